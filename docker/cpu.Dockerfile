# slime on CPU: the wheels in dist/ with the versions of constraints.txt (docs/how-to/containers.md).
#   make release && docker build -f docker/cpu.Dockerfile -t slime-cpu .
# BASE: any image with Python 3.11 or newer, and its venv.
ARG BASE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
FROM ${BASE}
ARG TORCH=2.13.0
# An index with torch's CPU build spares 4 GB of CUDA libraries.
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=bind,source=dist,target=/mnt/dist \
    --mount=type=bind,source=constraints.txt,target=/mnt/constraints.txt \
    python3 -m venv /opt/slime \
    && /opt/slime/bin/pip install --no-cache-dir -c /mnt/constraints.txt "torch==${TORCH}" /mnt/dist/*.whl \
    && useradd --uid 1000 --create-home slime \
    && install -d -o 1000 -g 1000 /work
ENV PATH=/opt/slime/bin:$PATH
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["slime"]
CMD ["--help"]
