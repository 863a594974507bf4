"""Warnings that an evaluated model learned from data that was not decontaminated against the benchmark.

They are based on records of artifacts, so they cover models that another recipe trained.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flows.recipe.version import Identity
from flows.store.record import Artifact, Record, UpstreamEntry
from stages.harnesses.registry import DEFAULT_HARNESS
from stages.kinds.registry import kind_of, makes

Find = Callable[[str, str], Artifact | None]
Task = tuple[str, str, str | None]
"""Evaluation task: name, harness, and the hash of the folder that defines it (None for the harness's own)."""


def contamination_warnings(identity: Identity, upstream: Mapping[str, UpstreamEntry], find: Find) -> Iterator[str]:
    """Yield contamination warnings for an evaluation stage, by its upstream artifacts; none for other kinds."""
    if not makes(str(identity["kind"]), "scores"):
        return
    tasks = _tasks_of(identity, identity["config"], "")
    # Several paths may lead to the same dataset: one warning for each stage that learned from it.
    learned = {(stage, dataset.version): dataset for stage, dataset in _learned(upstream, find)}
    for (stage, _), dataset in learned.items():
        if missing := sorted(name for name, _, _ in tasks - _compared_with(dataset, find)):
            yield (
                f"{dataset.stage}, from which {stage} learned, was not decontaminated against {', '.join(missing)}: "
                "scores may be of memory; learn from a stage of `kind: curate` that has the step `decontaminate`"
            )


def _learned(upstream: Mapping[str, UpstreamEntry], find: Find) -> Iterator[tuple[str, UpstreamEntry]]:
    """Yield each dataset that ancestors of the given artifacts learned from, paired with its training stage's name."""
    for entry in upstream.values():
        record = _record(entry, find)
        if not record or record.product == "dataset":
            continue
        for source in record.upstream.values() if kind_of(record.kind).LEARNS else ():
            if _is_dataset(source, find):
                yield record.stage, source
        yield from _learned(record.upstream, find)


def _compared_with(dataset: UpstreamEntry, find: Find) -> set[Task]:
    """Return the evaluation tasks against which all rows of a dataset were decontaminated.

    A dataset counts as decontaminated by its own stage, or when all datasets that it is made of are.
    """
    record = _record(dataset, find)
    if record is None:
        return set()
    config: Any = record.identity["config"]
    # Tasks are compared with the hash of their folder: the same name may mean other questions.
    own: set[Task] = set()
    for name, block in (config.get("decontaminate") or {}).get("benchmarks", {}).items():
        own |= _tasks_of(record.identity, block, f"decontaminate.benchmarks.{name}.")
    made_of = [entry for entry in record.upstream.values() if _is_dataset(entry, find)]
    return own.union(set.intersection(*(_compared_with(entry, find) for entry in made_of)) if made_of else ())


def _tasks_of(identity: Identity, block: Any, path: str) -> set[Task]:
    """Return the evaluation tasks named in one block of a stage's config. path: dotted prefix of the block's fields."""
    outside: Any = identity["outside"]
    harness = block.get("harness", DEFAULT_HARNESS)
    return {(task, harness, outside.get(f"{path}task_folder")) for task in block["tasks"]}


def _is_dataset(entry: UpstreamEntry, find: Find) -> bool:
    record = _record(entry, find)
    return record is not None and record.product == "dataset"


def _record(entry: UpstreamEntry, find: Find) -> Record | None:
    artifact = find(entry.kind, entry.version)
    return artifact.record if artifact else None
