# FlashInfer with sm120kit's patches and compiled modules, on a base that brings Python 3.
#
# Built from a context that `sm120kit image --context-only` makes: tools/ (pip), locked/ (third-party wheels) and ours/ (the patched
# wheel), each with a requirements file of sha256 hashes. Nothing is fetched, so no package host or credential can stay behind.
ARG BASE
FROM ${BASE} AS locked
ARG SOURCE_DATE_EPOCH
COPY tools/ /context/tools/
COPY locked/ /context/locked/
# A venv has no pip; the one from tools/ runs as a zip and is not installed. Bytecode carries the hash of its source, not a time,
# which is why nothing but compileall may write it. Packages carry files for other Pythons, which compileall counts as failures.
RUN set -eu; export PYTHONDONTWRITEBYTECODE=1; \
    python3 -m venv --without-pip /opt/venv; \
    PYTHONPATH=$(echo /context/tools/pip-*.whl) /opt/venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --root-user-action ignore --no-cache-dir --no-index --no-deps --no-compile --require-hashes \
        --find-links /context/locked --requirement /context/locked/requirements.txt; \
    /opt/venv/bin/python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/venv/lib || :; \
    find /opt/venv -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH}" {} +

FROM locked AS ours
ARG SOURCE_DATE_EPOCH
COPY ours/ /context/ours/
RUN set -eu; export PYTHONDONTWRITEBYTECODE=1; \
    PYTHONPATH=$(echo /context/tools/pip-*.whl) /opt/venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --root-user-action ignore --no-cache-dir --no-index --no-deps --no-compile --require-hashes --root /overlay \
        --find-links /context/ours --requirement /context/ours/requirements.txt; \
    /opt/venv/bin/python -m compileall -qq -s /overlay -p / --invalidation-mode unchecked-hash /overlay/opt/venv/lib || :; \
    mkdir -p /overlay/etc; \
    cp /etc/passwd /etc/group /overlay/etc/; \
    echo 'sm120kit:x:1000:1000:sm120kit:/home/sm120kit:/usr/sbin/nologin' >> /overlay/etc/passwd; \
    echo 'sm120kit:x:1000:' >> /overlay/etc/group; \
    install --directory --owner 1000 --group 1000 /overlay/home/sm120kit; \
    find /overlay -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH}" {} +

FROM ${BASE} AS runtime
ARG ARCH_LIST
# Third-party wheels first: a changed patch re-pulls only the layer below them.
COPY --from=locked /opt/venv /opt/venv
COPY --from=ours /overlay/ /
# The patched version is X+sm120kit.N, and flashinfer-cubin, where an engine brings it, insists on X. There is no compiler here,
# so a module that was not compiled ahead fails at once and by name.
ENV PATH=/opt/venv/bin:${PATH} \
    FLASHINFER_CUDA_ARCH_LIST=${ARCH_LIST} \
    FLASHINFER_DISABLE_JIT=1 \
    FLASHINFER_DISABLE_VERSION_CHECK=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all
USER 1000:1000
WORKDIR /home/sm120kit
# No HEALTHCHECK: a library, not a server.
CMD ["python"]
