# hororing for processors: hororun, PyTorch, the examples.
#
#   docker build -f packaging/docker/cpu.Dockerfile -t hororing:cpu .
#   docker run --rm hororing:cpu                            # python -m hororing info
#   docker run --rm --shm-size=1g hororing:cpu hororun -np 2 python examples/torch_digits.py
#
# EXTRAS selects the frameworks (torch, tensorflow, keras) and the examples' packages. On x86
# PyPI's torch brings CUDA's libraries along, gigabytes: PIP_EXTRA_INDEX_URL is PyTorch's index of
# builds without them. Docker gives a container 64 MiB of shared memory by default.

FROM debian:12.11-slim AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ make python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python3 -m venv /build \
 && /build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM debian:12.11-slim
ARG EXTRAS=torch,examples
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
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
      org.opencontainers.image.description="Data-parallel training: Horovod's API, hororun, PyTorch for CPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
# mpirun: more processes than cores, and room for a thread of each (docs/troubleshooting.md).
ENV PATH=/opt/hororing/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe \
    PRTE_MCA_hwloc_default_binding_policy=none
USER 10001
WORKDIR /home/hororing
CMD ["python", "-m", "hororing", "info"]
