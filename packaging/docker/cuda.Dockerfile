# hororing for NVIDIA GPUs: hororun, PyTorch with CUDA and NCCL, the examples. The driver's library
# comes from the host, through NVIDIA's container toolkit; CUDA's runtime and NCCL come with torch.
#
#   docker build -f packaging/docker/cuda.Dockerfile -t hororing:cuda .
#   docker run --rm --gpus all hororing:cuda                # python -m hororing info
#   docker run --rm --gpus all --shm-size=1g hororing:cuda hororun -np 8 python train.py
#
# The build stage needs no CUDA: one build of hororing serves CPUs and GPUs (docs/gpu.md).

FROM ubuntu:24.04 AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python3 -m venv /build \
 && /build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
ARG EXTRAS=torch,examples
RUN apt-get update \
 && apt-get install -y --no-install-recommends openssh-client python3-venv \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN python3 -m venv /opt/hororing \
 && wheel="$(echo /wheels/*.whl)" \
 && /opt/hororing/bin/pip install --no-cache-dir "${wheel}[${EXTRAS}]" \
 && rm -rf /wheels
RUN useradd --create-home --uid 10001 hororing
COPY --chown=hororing examples /home/hororing/examples

LABEL org.opencontainers.image.title="hororing" \
      org.opencontainers.image.description="Data-parallel training: Horovod's API, hororun, PyTorch for GPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
# mpirun: more processes than cores, and room for a thread of each (docs/troubleshooting.md).
ENV PATH=/opt/hororing/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe \
    PRTE_MCA_hwloc_default_binding_policy=none
USER 10001
WORKDIR /home/hororing
CMD ["python", "-m", "hororing", "info"]
