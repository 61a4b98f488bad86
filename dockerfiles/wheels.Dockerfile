# How every image begins: its wheels, installed in stages that the last one copies from. sm120kit puts this before <kind>.Dockerfile,
# and adds what a recipe sets behind it: environment and entrypoint.
#
# Built from a context that `sm120kit build` or `sm120kit image` makes: tools/ (pip and scripts), and cuda/ (NVIDIA's wheels),
# locked/ (all others) and ours/ (built here), each with a requirements file of sha256 hashes. Nothing is fetched, so no package
# host or credential can stay behind.
ARG BASE
FROM ${BASE} AS installer
ARG SOURCE_DATE_EPOCH
COPY tools/ /context/tools/
# A venv has no pip; the one from tools/ runs as a zip and is not installed. The last stage copies /empty, not /opt/venv: a
# directory that COPY makes by itself has the time of the build, and with it the layer another digest in each build.
RUN python3 -m venv --without-pip /opt/venv && mkdir -p /empty/opt && cp -a /opt/venv /empty/opt/ \
    && find /opt/venv /empty -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH}" {} +

# Three stages beside each other, what changes least first: a layer that did not change is neither built nor pulled again.
FROM installer AS cuda
ARG SOURCE_DATE_EPOCH
COPY cuda/ /context/cuda/
RUN sh /context/tools/install.sh cuda

FROM installer AS locked
ARG SOURCE_DATE_EPOCH
COPY locked/ /context/locked/
RUN sh /context/tools/install.sh locked

FROM installer AS ours
ARG SOURCE_DATE_EPOCH
COPY ours/ /context/ours/
RUN sh /context/tools/install.sh ours && sh /context/tools/user.sh

