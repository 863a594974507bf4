"""MLflow parameters and tags of a stage's run, computed before the stage starts, without I/O.

All of the identity is logged, and nothing else: a recipe keeps secrets in `execution.environment`, or outside. A secret
that is in a value anyway is redacted.
"""

from collections.abc import Mapping
from typing import Any

from flows.planning.plan import PlannedStage
from stages.core.redaction import redact
from stages.hubs.fetched import FetchedConfig


def params_of(planned: PlannedStage) -> dict[str, str]:
    """Return a stage's config and outside inputs as flat MLflow parameters, such as `layout.dp_shard` with value `2`.

    A source is logged as the recipe has it: its path is no identity, but people look for it.
    """
    config = planned.config
    tree = {**_mapping(planned.identity.get("config")), **_mapping(planned.identity.get("outside"))}
    if isinstance(config, FetchedConfig):
        tree[config.product] = str(config.source)
    return {name: redact(value) for name, value in flatten(tree).items()}


def tags_of(planned: PlannedStage) -> dict[str, str]:
    """Return the tags to find a stage's run by in MLflow: recipe, kind, version, …, upstream versions by field."""
    config = _mapping(planned.identity.get("config"))
    tags = {
        "recipe": planned.recipe,
        "stage": planned.name,
        "kind": planned.kind,
        "version": planned.version,
        **{f"upstream.{field}": str(version) for field, version in _mapping(planned.identity.get("upstream")).items()},
        "launcher": planned.config.execution.launcher,
        "nodes": str(planned.config.execution.nodes),
    }
    if "engine" in config:
        tags["engine"] = str(config["engine"])
    if "layout" in config:
        tags["layout"] = layout_text(_mapping(config["layout"]))
    return tags


def layout_text(layout: Mapping[str, Any]) -> str:
    """Return a layout as text such as `dp_replicate=1 dp_shard=2 …`, the same for equal layouts."""
    return " ".join(f"{name}={value}" for name, value in flatten(layout).items())


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested mappings as a flat dict of dotted names to texts; lists joined by commas, without None."""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            flat[f"{prefix}{name}"] = ", ".join(map(str, value))
        elif value is not None:
            flat[f"{prefix}{name}"] = str(value)
    return flat


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
