# Both environments in one image, for a machine of its own: a whole refresh, which serves with vLLM beside what trains.
#   docker build --file deploy/docker/all.Dockerfile --tag llm-lifecycle-all .
# PIPELINE, SERVE: the images of pipeline.Dockerfile and serve.Dockerfile, which start from the same Python.
ARG PIPELINE=llm-lifecycle-pipeline
ARG SERVE=llm-lifecycle-serve

FROM ${SERVE} AS serve

FROM ${PIPELINE}
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=serve /opt/serve /opt/serve
ENV LIFECYCLE_VLLM=/opt/serve/bin/vllm VLLM_NO_USAGE_STATS=1
USER 1000:1000
CMD ["lifecycle", "--help"]
