"""Identities of a refresh's OpenTelemetry trace, which its stages know before the spans themselves are sent.

Ids are hashes of names. Traces are made where OTEL_EXPORTER_OTLP_ENDPOINT names a receiver of spans.
"""

import hashlib
import os

from stages.core.contract import StageConfig
from stages.remote.http import TRACE_VARIABLE

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def trace_id(refresh: str) -> str:
    """Return the id of a refresh's trace: 32 hexadecimal digits."""
    return hashlib.sha256(refresh.encode()).hexdigest()[:32]


def span_id(name: str) -> str:
    """Return the id of a span, 16 hexadecimal digits. name: a refresh, `REFRESH/STAGE`, or an attempt's key."""
    return hashlib.sha256(f"span {name}".encode()).hexdigest()[:16]


def traced(config: StageConfig, key: str | None) -> StageConfig:
    """Return a stage's config whose processes know their attempt's span, by its key in the ledger.

    They hand it on to model servers, whose own spans then stand below it. Without a receiver nothing changes.
    """
    if not key or not os.environ.get(ENDPOINT):
        return config
    span = f"00-{trace_id(key.rpartition('/')[0])}-{span_id(key)}-01"
    environment = {TRACE_VARIABLE: span, **config.execution.environment}
    return config.model_copy(update={"execution": config.execution.model_copy(update={"environment": environment})})
