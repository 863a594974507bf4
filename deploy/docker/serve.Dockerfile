# vLLM, for a Deployment that `lifecycle render` prints, or for a host of its own.
#   docker build --file deploy/docker/serve.Dockerfile --build-arg DEVICE=cpu --tag llm-lifecycle-serve .
# DEVICE: cpu or cuda. The API key comes as VLLM_API_KEY, the model as a volume.
# UV_FIND_LINKS: folder of wheels, mounted into the build, from which torch comes instead of PyTorch's registry.
# PYTHON_DIGEST: of Python's image (sha256:…), for builds that start from the same bytes every time; without it, from what
# the tag means on that day.
ARG DEVICE=cpu
ARG PYTHON_DIGEST=

FROM python:3.11-slim-bookworm${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS base
RUN pip install --no-cache-dir uv==0.13.8 && uv venv /opt/serve
WORKDIR /build
COPY deploy/requirements deploy/requirements

FROM base AS cpu
ARG UV_FIND_LINKS=
COPY deploy/torchvision-without-cuda deploy/torchvision-without-cuda
COPY deploy/vllm-metadata deploy/vllm-metadata
RUN if [ -z "${UV_FIND_LINKS}" ]; then export UV_TORCH_BACKEND=cpu; fi && \
    uv pip install --no-cache --compile-bytecode --python /opt/serve/bin/python \
        --requirement deploy/requirements/serve-cpu.txt --overrides deploy/requirements/serve-cpu-overrides.txt \
        ./deploy/vllm-metadata ./deploy/torchvision-without-cuda

FROM base AS cuda
RUN uv pip install --no-cache --compile-bytecode --torch-backend=cu130 --python /opt/serve/bin/python \
        --requirement deploy/requirements/serve-cuda.txt

FROM ${DEVICE} AS built

FROM python:3.11-slim-bookworm${PYTHON_DIGEST:+@${PYTHON_DIGEST}}
# vLLM compiles kernels at the first start.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=built /opt/serve /opt/serve
# The proxy that stands before the engine in a pod.
COPY stages /opt/lifecycle/stages
ENV PATH=/opt/serve/bin:$PATH DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
RUN useradd --uid 1000 --home-dir /tmp --no-create-home serve && chmod 0755 /var/tmp /run/lock && rm /opt/serve/.lock
USER 1000:1000
EXPOSE 8000
ENTRYPOINT []
CMD ["vllm", "--help"]
