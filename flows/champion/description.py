"""What a registered version says of itself in MLflow: its scores, the data behind it, where it came from."""

from __future__ import annotations

from collections.abc import Iterable

from flows.ledger.record import final_result
from flows.store.record import Record, UpstreamEntry
from flows.store.store import Store


def scores_of(store: Store, evaluations: Iterable[UpstreamEntry]) -> dict[str, float]:
    """Final metrics of the evaluations that are in the store, without standard errors."""
    found = (store.find(entry.kind, entry.version) for entry in evaluations)
    metrics = {
        name: value for artifact in found if artifact for name, value in final_result(artifact.folder).metrics.items()
    }
    return {name: value for name, value in metrics.items() if not name.endswith("_stderr")}


def data_of(store: Store, model: UpstreamEntry) -> list[str]:
    """Datasets that a model, or one that it was made from, learned from: `problems: builtin/addition`."""
    todo, seen, data = [model], set(), []
    while todo:
        entry = todo.pop()
        artifact = store.find(entry.kind, entry.version)
        if artifact is None or entry.version in seen:
            continue
        seen.add(entry.version)
        if artifact.record.product == "dataset":
            data.append(f"{entry.stage}: {artifact.record.tags.get('source', entry.version)}")
        todo += artifact.record.upstream.values()
    return sorted(data)


def describe(promotion: Record, base: UpstreamEntry | None, scores: dict[str, float], data: Iterable[str]) -> str:
    """Markdown for the page of the version; base: of an adapter."""
    model = promotion.upstream["model"]
    beside = f", an adapter of `{base.stage}-{base.version}`" if base else ""
    said = ", ".join(f"{name} {value:.4g}" for name, value in scores.items()) or "none"
    return "\n\n".join(
        [
            f"`{model.stage}-{model.version}` of the recipe `{promotion.recipe}`{beside}",
            f"**Scores**: {said}",
            f"**Data**: {', '.join(data) or 'none of this store'}",
        ]
    )
