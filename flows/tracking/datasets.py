"""MLflow dataset inputs of a run: the data splits that its stage read, or the tasks of its evaluation."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.planning.changes import rows_of
from flows.store.record import Artifact, Record
from flows.store.store import read_artifact
from stages.core.errors import DataError
from stages.data.files import Row, find_files, read_rows
from stages.harnesses.scores import read_samples
from stages.hubs.registry import HUBS
from stages.remote.pointers import is_pointer, size_bytes

UPSTREAM = "upstream."
DIGEST_CHARACTERS = 36
"""Most characters of a dataset digest that MLflow accepts."""
SPLITS = {"split": "training", "evaluation_split": "evaluation"}
"""MLflow context (`training`, `evaluation`) of a dataset split, by the config field that names the split."""
TYPES = {bool: "boolean", int: "long", float: "double", str: "string"}


@dataclass(frozen=True)
class ReadDataset:
    """Dataset that a run has read, in the form in which MLflow stores it as an input.

    source, profile: JSON objects. columns: MLflow's schema, from the first row; None where there is no row.
    """

    name: str
    digest: str
    source_type: str
    source: dict[str, str]
    profile: dict[str, int]
    columns: list[dict[str, Any]] | None
    context: str


def datasets_read(tags: Mapping[str, str], params: Mapping[str, str], store: Path) -> Iterator[ReadDataset]:
    """Yield each dataset split that a stage's run reads, found in the store by the run's MLflow tags and parameters."""
    for tag, version in tags.items():
        if not tag.startswith(UPSTREAM) or not tag.endswith("dataset"):
            continue
        # KIND/STAGE-VERSION: a version is enough to find its folder.
        artifact = next((one for folder in store.glob(f"*/*-{version}") if (one := read_artifact(folder))), None)
        if artifact and artifact.record.product == "dataset":
            # upstream.data.dataset -> `data.`, so the splits are the parameters data.split and data.evaluation_split.
            prefix = tag.removeprefix(UPSTREAM).removesuffix("dataset")
            splits = {
                params[f"{prefix}{name}"]: context for name, context in SPLITS.items() if f"{prefix}{name}" in params
            }
            for split, context in splits.items():
                with suppress(DataError, OSError):  # the stage itself reports problems of its data
                    yield _read_split(artifact, split, context)


def tasks_read(folder: Path) -> Iterator[ReadDataset]:
    """Yield each task of a finished evaluation as an MLflow dataset, with the number of samples that were evaluated."""
    with suppress(OSError, ValueError):
        scores = json.loads((folder / "scores.json").read_bytes())
        for task, numbers in scores.get("n-samples", {}).items():
            config = scores.get("configs", {}).get(task, {})
            place = " ".join(str(config[name]) for name in ("dataset_path", "dataset_name") if config.get(name))
            yield ReadDataset(
                name=task,
                digest=_task_digest(folder, task, config),
                source_type="lm_eval",
                source={"uri": place or task, "version": str(scores.get("versions", {}).get(task))},
                profile={"num_rows": numbers["original"], "num_asked": numbers["effective"]},
                columns=None,
                context="evaluation",
            )


def _task_digest(folder: Path, task: str, config: object) -> str:
    """Return a digest of an evaluation task's config and of the samples that were evaluated, if they are recorded."""
    hashes = [json.dumps(config, sort_keys=True, default=str)]
    with suppress(OSError, ValueError):
        # Tasks of equal configs may have asked other samples, such as under another limit.
        hashes += [str(sample.get("doc_hash")) for sample in read_samples(folder, task)]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()[:DIGEST_CHARACTERS]


def _read_split(artifact: Artifact, split: str, context: str) -> ReadDataset:
    record, folder = artifact.record, artifact.folder / "data"
    files = find_files(folder, split)
    here = () if any(map(is_pointer, files)) else files  # files on other servers are not opened
    first = next((row.content for row in read_rows(folder, list(here)) if isinstance(row, Row)), None)
    counts = [rows_of(file) for file in files]
    sizes = {"num_files": len(files), "num_bytes": sum(map(size_bytes, files))}
    known = [count for count in counts if count is not None]
    source_type, source = _source(record)
    return ReadDataset(
        name=f"{record.stage}/{split}",
        digest=record.digest[:DIGEST_CHARACTERS],
        source_type=source_type,
        source=source,
        # Rows are known only if those of every file are.
        profile={**({"num_rows": sum(known)} if len(known) == len(counts) else {}), **sizes},
        columns=[*map(_column, first.items())] if isinstance(first, dict) else None,
        context=context,
    )


def _column(named: tuple[str, object]) -> dict[str, Any]:
    name, value = named
    return {"type": TYPES.get(type(value), "any"), "name": name, "required": True}


def _source(record: Record) -> tuple[str, dict[str, str]]:
    """Return type and description of a dataset's source for MLflow, which knows Hugging Face's hub and local files."""
    source, revision = record.tags.get("source"), record.tags.get("revision", "")
    if source is None:
        return record.kind, {"uri": f"{record.kind}/{record.stage}-{record.version}"}
    hub, _, rest = source.partition("://")
    if hub == "hf":
        # hf://datasets/OWNER/NAME@REVISION -> OWNER/NAME
        return "hugging_face", {"path": rest.removeprefix("datasets/").partition("@")[0], "revision": revision}
    is_local = hub in HUBS and HUBS[hub].is_local
    return ("local" if is_local else "code"), {"uri": rest if is_local else source, "revision": revision}
