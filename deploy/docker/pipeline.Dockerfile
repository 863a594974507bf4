# The pipeline: the `lifecycle` command, stages' processes, Prefect and MLflow. vLLM has an image of its own.
#   docker build --file deploy/docker/pipeline.Dockerfile --build-arg TORCH_BACKEND=cpu --tag llm-lifecycle-pipeline .
# TORCH_BACKEND: cpu, or a build of torch for CUDA (cu130, …), which brings CUDA's libraries along; the host needs the
# driver and the NVIDIA container toolkit.
# PYTHON_DIGEST: of Python's image (sha256:…), for builds that start from the same bytes every time; without it, from what
# the tag means on that day.
ARG PYTHON_DIGEST=

FROM python:3.11-slim-bookworm${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS build
ARG TORCH_BACKEND=cpu
RUN pip install --no-cache-dir uv==0.13.8
WORKDIR /build
COPY deploy/requirements/pipeline.in deploy/requirements/pipeline.txt deploy/requirements/fp8.in deploy/requirements/
RUN uv venv /opt/pipeline && \
    uv pip install --no-cache --compile-bytecode --torch-backend=${TORCH_BACKEND} --python /opt/pipeline/bin/python \
        --constraints deploy/requirements/pipeline.txt --requirement deploy/requirements/pipeline.in && \
    if [ "${TORCH_BACKEND}" != cpu ]; then \
        uv pip install --no-cache --compile-bytecode --no-deps --python /opt/pipeline/bin/python \
            --requirement deploy/requirements/fp8.in; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY flows flows
COPY stages stages
RUN uv pip install --no-cache --compile-bytecode --no-deps --python /opt/pipeline/bin/python .

FROM python:3.11-slim-bookworm${PYTHON_DIGEST:+@${PYTHON_DIGEST}}
COPY --from=build /opt/pipeline /opt/pipeline
COPY configs /opt/configs
ENV PATH=/opt/pipeline/bin:$PATH LIFECYCLE_HOME=/lifecycle \
    DO_NOT_TRACK=true PREFECT_SERVER_ANALYTICS_ENABLED=false MLFLOW_DISABLE_TELEMETRY=true
RUN useradd --uid 1000 --create-home lifecycle && install --directory --owner=1000 --group=1000 --mode=0700 /lifecycle
USER 1000:1000
VOLUME /lifecycle
ENTRYPOINT []
CMD ["lifecycle", "--help"]
