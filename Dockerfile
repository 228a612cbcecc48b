# An image for GPUs, and for CPU ranks:
#   docker build -t cifar-zero .
#   docker build -t cifar-zero:cpu --build-arg BASE=debian:bookworm-slim .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/workspace/runs" cifar-zero python train.py --strategy deepspeed_stage_3
# BASE has the CUDA toolkit of torch's wheel, against which DeepSpeed compiles its Adam for CPUs and offload to NVMe.
ARG BASE=nvidia/cuda:13.2.0-devel-ubuntu24.04
FROM ${BASE}

# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ git libaio-dev make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY requirements.lock ./
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir --require-hashes -r requirements.lock
ENV PATH=/opt/venv/bin:$PATH

COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable .
CMD ["python", "train.py"]
