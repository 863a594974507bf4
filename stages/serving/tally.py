"""Counts of the proxy's answers by model version, for Prometheus and for comparing a canary with its champion.

Engines' own metrics get the same labels, `lifecycle_model` and `lifecycle_version`, so that one dashboard shows a
champion and its challenger, whichever engine serves them.
"""

import re
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from stages.serving.exchange import Exchange

LABELS = ("lifecycle_model", "lifecycle_version")
BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
NUM_LATENCIES = 10_000
"""Number of most recent answers from which latency percentiles are computed."""
SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?P<brace>\{)?")
COMMENT = re.compile(r"# (?:HELP|TYPE) (?P<name>\S+)")


@dataclass(frozen=True)
class ServedVersion:
    """Name and version of a registered model, or of an artifact, that the proxy serves."""

    model: str
    version: str


@dataclass
class Tally:
    """Counts of one model version. latencies_s: of answers without error, from a request's arrival to the last byte."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    buckets: Counter[float] = field(default_factory=Counter)
    seconds: float = 0.0
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_LATENCIES))

    @property
    def num_requests(self) -> int:
        return self.statuses.total()

    @property
    def num_errors(self) -> int:
        """Number of requests that ended with a server error (5xx)."""
        # A copy, here and below: these methods are called from other threads than the one that counts.
        return sum(count for (_, status), count in [*self.statuses.items()] if status >= 500)

    def count(self, route: str, exchange: Exchange, seconds: float) -> None:
        self.statuses[route, exchange.status] += 1
        self.finish_reasons.update(exchange.finish_reasons)
        self.prompt_tokens += exchange.prompt_tokens
        self.completion_tokens += exchange.completion_tokens
        if exchange.status < 400:
            # In the smallest bucket that fits; `_cumulative` adds up, as Prometheus' buckets hold all that is faster.
            self.buckets[next((bound for bound in BUCKETS_S if seconds <= bound), float("inf"))] += 1
            self.seconds += seconds
            self.latencies_s.append(seconds)

    def latency_s(self, percent: int) -> float | None:
        """Return a percentile of the recent answers' latency in seconds; None for fewer than two answers."""
        latencies_s = [*self.latencies_s]
        if len(latencies_s) < 2:
            return None
        return statistics.quantiles(latencies_s, n=100, method="inclusive")[percent - 1]


class Tallies(Collector):
    """Counts of all model versions that the proxy has served, as a Prometheus collector."""

    def __init__(self) -> None:
        self._tallies: dict[ServedVersion, Tally] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def of(self, version: ServedVersion) -> Tally:
        """Return the counts of a model version, creating empty ones at first."""
        return self._tallies.setdefault(version, Tally())

    def side_by_side(self) -> list[dict[str, Any]]:
        """Return requests, errors, latencies (seconds), tokens and finish reasons of each served model version."""
        return [
            {
                "model": version.model,
                "version": version.version,
                "requests": tally.num_requests,
                "errors": tally.num_errors,
                "latency_p50_s": tally.latency_s(50),
                "latency_p95_s": tally.latency_s(95),
                "prompt_tokens": tally.prompt_tokens,
                "completion_tokens": tally.completion_tokens,
                "finish_reasons": dict(tally.finish_reasons),
            }
            for version, tally in [*self._tallies.items()]
        ]

    def as_text(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "lifecycle_requests", "Requests that were answered.", labels=[*LABELS, "route", "status"]
        )
        finished = CounterMetricFamily(
            "lifecycle_finish_reasons", "Why answers ended.", labels=[*LABELS, "finish_reason"]
        )
        prompts = CounterMetricFamily("lifecycle_prompt_tokens", "Tokens of prompts.", labels=LABELS)
        completions = CounterMetricFamily("lifecycle_completion_tokens", "Tokens of answers.", labels=LABELS)
        durations = HistogramMetricFamily(
            "lifecycle_request_duration_seconds", "From arrival to the answer's last byte.", labels=LABELS
        )
        for version, tally in [*self._tallies.items()]:
            labels = [version.model, version.version]
            for (route, status), count in [*tally.statuses.items()]:
                requests.add_metric([*labels, route, str(status)], count)
            for reason, count in [*tally.finish_reasons.items()]:
                finished.add_metric([*labels, reason], count)
            prompts.add_metric(labels, tally.prompt_tokens)
            completions.add_metric(labels, tally.completion_tokens)
            durations.add_metric(labels, [*_cumulative(tally.buckets)], tally.seconds)
        return [requests, finished, prompts, completions, durations]


def _cumulative(buckets: Counter[float]) -> Iterator[tuple[str, float]]:
    total = 0
    for bound in (*BUCKETS_S, float("inf")):
        total += buckets[bound]
        yield floatToGoString(bound), total


def labelled(engines: Iterable[tuple[ServedVersion, str]]) -> str:
    """Join the metrics of several engines into one Prometheus text, each sample labelled with its model version.

    Families are kept together, as the format requires, with the comments of the first engine that has them.
    """
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for version, text in engines:
        labels = ",".join(
            f'{label}="{_escaped(value)}"'
            for label, value in zip(LABELS, (version.model, version.version), strict=True)
        )
        family, known = "", {*comments}  # `known`: families whose comments an earlier engine has given
        for line in text.splitlines():
            if comment := COMMENT.match(line):
                family = comment["name"]
                if family not in known:
                    comments.setdefault(family, []).append(line)
            elif sample := SAMPLE.match(line):
                # A histogram's samples `x_bucket`, `x_sum` and `x_count` belong to the family `x` above them.
                family = family if family and sample["name"].startswith(family) else sample["name"]
                rest = line[sample.end() :]
                marked = f"{labels},{rest}" if sample["brace"] else f"{labels}}}{rest}"
                samples.setdefault(family, []).append(f"{sample['name']}{{{marked}")
    families = {**comments, **samples}
    return "".join(f"{line}\n" for one in families for line in comments.get(one, []) + samples.get(one, []))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
