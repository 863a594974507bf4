# The pipeline: the `lifecycle` command, stages' processes, Prefect and MLflow. vLLM has an image of its own.
#   docker build --file deploy/docker/pipeline.Dockerfile --build-arg TORCH_BACKEND=cpu --tag llm-lifecycle-pipeline .
# TORCH_BACKEND: cpu, or a build of torch for CUDA (cu130, …), which brings CUDA's libraries along; the host needs the
# driver and the NVIDIA container toolkit.
# TRANSFORMER_ENGINE: yes for Megatron-core's mixtures of experts, context parallelism and fp8 on GPUs, with a build for
# CUDA 13, against which its part for torch is compiled. Written, not run.
# UV_FIND_LINKS: folder of wheels, mounted into the build, from which torch comes instead of PyTorch's registry.
# PYTHON_DIGEST, CUDA_DIGEST: of Python's and of NVIDIA's image (sha256:…), for builds that start from the same bytes every
# time; without them, from what the tags mean on that day.
ARG TRANSFORMER_ENGINE=no
ARG PYTHON_DIGEST=
ARG CUDA_DIGEST=

FROM python:3.11-slim-bookworm${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS base
RUN pip install --no-cache-dir uv==0.13.8 && mkdir /wheels

FROM base AS wheels-no

# Ubuntu 22.04, whose C library is older than that of the image where the wheels are used.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu22.04${CUDA_DIGEST:+@${CUDA_DIGEST}} AS wheels-yes
ARG TORCH_BACKEND=cu130
COPY --from=base /usr/local/bin/uv /usr/local/bin/uv
WORKDIR /build
COPY deploy/requirements/pipeline.txt deploy/requirements/transformer-engine.in deploy/requirements/
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* && \
    uv venv --seed --python 3.11 /opt/builder && \
    uv pip install --no-cache --torch-backend=${TORCH_BACKEND} --python /opt/builder/bin/python \
        --constraints deploy/requirements/pipeline.txt torch setuptools wheel pybind11 ninja packaging && \
    /opt/builder/bin/python -m pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels \
        --requirement deploy/requirements/transformer-engine.in

FROM wheels-${TRANSFORMER_ENGINE} AS wheels

FROM base AS build
ARG TORCH_BACKEND=cpu
ARG UV_FIND_LINKS=
WORKDIR /build
COPY deploy/requirements/pipeline.in deploy/requirements/pipeline.txt deploy/requirements/fp8.in deploy/requirements/
COPY deploy/requirements/shared-store.in deploy/requirements/shared-store.txt deploy/requirements/
COPY deploy/torchvision-without-cuda deploy/torchvision-without-cuda
RUN if [ -z "${UV_FIND_LINKS}" ]; then export UV_TORCH_BACKEND=${TORCH_BACKEND}; fi && \
    uv venv /opt/pipeline && \
    uv pip install --no-cache --compile-bytecode --python /opt/pipeline/bin/python \
        --constraints deploy/requirements/pipeline.txt --requirement deploy/requirements/pipeline.in \
        --constraints deploy/requirements/shared-store.txt --requirement deploy/requirements/shared-store.in && \
    if [ "${TORCH_BACKEND}" != cpu ]; then \
        uv pip install --no-cache --compile-bytecode --no-deps --python /opt/pipeline/bin/python \
            --requirement deploy/requirements/fp8.in; \
    else \
        uv pip install --no-cache --compile-bytecode --no-deps --python /opt/pipeline/bin/python \
            ./deploy/torchvision-without-cuda; \
    fi
COPY --from=wheels /wheels /wheels
RUN for wheel in /wheels/*.whl; do \
        [ ! -e "${wheel}" ] || uv pip install --no-cache --python /opt/pipeline/bin/python \
            --constraints deploy/requirements/pipeline.txt --find-links /wheels "${wheel}"; \
    done
COPY pyproject.toml setup.py README.md LICENSE ./
COPY deploy/requirements deploy/requirements
COPY deploy/vllm-metadata deploy/vllm-metadata
COPY configs configs
COPY flows flows
COPY stages stages
RUN uv pip install --no-cache --compile-bytecode --no-deps --python /opt/pipeline/bin/python .

FROM python:3.11-slim-bookworm${PYTHON_DIGEST:+@${PYTHON_DIGEST}}
# `compile: true` and Triton's kernels are compiled where they run.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/pipeline /opt/pipeline
COPY configs /opt/configs
ENV PATH=/opt/pipeline/bin:$PATH LIFECYCLE_HOME=/lifecycle \
    DO_NOT_TRACK=true PREFECT_SERVER_ANALYTICS_ENABLED=false MLFLOW_DISABLE_TELEMETRY=true
# It writes to its home and to /tmp alone.
RUN useradd --uid 1000 --home-dir /tmp --no-create-home lifecycle && chmod 0755 /var/tmp /run/lock && rm /opt/pipeline/.lock && \
    install --directory --owner=1000 --group=1000 --mode=0700 /lifecycle
USER 1000:1000
VOLUME /lifecycle
ENTRYPOINT []
CMD ["lifecycle", "--help"]
