# FlashInfer with sm120kit's patches and compiled modules, on a base that brings Python 3.
FROM ${BASE} AS runtime
COPY --from=installer /empty/ /
COPY --from=cuda /overlay/ /
COPY --from=locked /overlay/ /
COPY --from=ours /overlay/ /
# The patched version is X+sm120kit.N, and flashinfer-cubin, where an engine brings it, insists on X. There is no compiler here,
# so a module that was not compiled ahead fails at once and by name.
ENV PATH=/opt/venv/bin:${PATH} \
    HOME=/home/sm120kit \
    USER=sm120kit \
    FLASHINFER_DISABLE_JIT=1 \
    FLASHINFER_DISABLE_VERSION_CHECK=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all
USER 1000:1000
WORKDIR /home/sm120kit
# No HEALTHCHECK: a library, not a server.
CMD ["python"]
