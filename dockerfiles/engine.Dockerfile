# vLLM or SGLang from official wheels, with our FlashInfer in the place of the official one.
#
# A compiler stays in the image, because engines compile at first use what nobody can compile ahead for every model: FlashInfer
# what our wheel does not carry (attention, sampling, norms), Triton and torch.compile their kernels and launchers. What that
# needs: nvcc with nvvm, crt, cccl and runtime headers (NVIDIA's wheels, pinned by the recipe; no cuBLAS, cuDNN or profilers of
# that toolkit), and from the base a C++ compiler and Python's headers.
FROM cuda AS toolkit
ARG SOURCE_DATE_EPOCH
COPY engine/ /context/engine/
RUN sh /context/engine/cuda_home.sh

FROM ${BASE} AS runtime
COPY --from=installer /empty/ /
COPY --from=cuda /overlay/ /
COPY --from=locked /overlay/ /
COPY --from=toolkit /toolkit/ /
COPY --from=ours /overlay/ /
# Our modules need libcudart.so.13 where torch brings that of CUDA 12: /opt/cuda/lib has libraries of CUDA 13 only by names that
# those of CUDA 12 do not have. All caches lie in the user's home, also where a container runs as a user whom the image does not name.
ENV PATH=/opt/venv/bin:${PATH} \
    HOME=/home/sm120kit \
    USER=sm120kit \
    CUDA_HOME=/opt/cuda \
    LD_LIBRARY_PATH=/opt/cuda/lib \
    NVIDIA_VISIBLE_DEVICES=all
USER 1000:1000
WORKDIR /home/sm120kit
HEALTHCHECK --interval=30s --timeout=10s --start-period=1h --retries=3 \
    CMD ["python", "/opt/sm120kit/healthy.py"]
