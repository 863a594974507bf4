"""Output of `lifecycle show` as text and JSON, from the store and the ledgers alone, without a server."""

import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from flows.cli.answers import terminal_width
from flows.cli.live import outcome_text
from flows.ledger.record import RefreshRecord, StageEntry, final_result, with_time_so_far
from flows.ledger.refreshes import Ledger, ledgers
from flows.recipe.text import closest
from flows.report.layouts import as_json, as_text, rows_of
from flows.running.outcome import summary_lines
from flows.store.record import Artifact, Index
from flows.tracking.cursor import run_id_of
from flows.tracking.labels import flatten
from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.errors import StoreError
from stages.core.files import read_json_lines
from stages.core.redaction import quoted
from stages.harnesses.scores import sample_answer, sample_prompt
from stages.rollouts.episode_table import ShownEpisode, shown_episodes
from stages.serving.engine import LAUNCH_FILE, LaunchSpec

RECENT_REFRESHES = 10
SHORTEST_PREFIX = 4
NOT_SHOWN_FIELDS = ("home", "stages", "attempts", "comparison", "trials", "measured")
LISTED_FIELDS = ("refresh", "recipe", "state", "started_ms", "seconds")
MOST_SAMPLES = 20
"""Largest number of samples or episodes shown of each file; the files of the artifact hold all."""
SHOWN_CHARACTERS = 1000


def recent_as_json(index: Index) -> dict[str, Any]:
    """Return the latest refreshes, and all artifacts of the store, newest first, as an object for `--json`."""
    records = [read_now(ledger) for ledger in islice(ledgers(), RECENT_REFRESHES)]
    return {
        "refreshes": [{name: getattr(record, name) for name in LISTED_FIELDS} for record in records],
        "artifacts": [_artifact_line(artifact) for artifact in _newest_first(index)],
    }


def recent_as_text(index: Index) -> str:
    """Return the latest refreshes and all artifacts of the store as text, one line for each."""
    lines = ["refreshes"]
    for ledger in islice(ledgers(), RECENT_REFRESHES):
        record = read_now(ledger)
        lines.append(f"  {record.refresh:<36} {state_of(record):<9} {record.seconds:8.1f} s  {record.state_counts}")
    lines.append("artifacts")
    for artifact in _newest_first(index):
        row = _artifact_line(artifact)
        lines.append(f"  {row['stage']:<20} {row['kind']:<9} {row['version']}  {row['finished']}  {row['folder']}")
    return "\n".join(lines)


def find_refresh(name: str) -> Ledger | None:
    """Return the refresh with this id, or the only one whose id begins with it; else None."""
    matches = [ledger for ledger in ledgers() if ledger.folder.name.startswith(name)]
    exact = [ledger for ledger in matches if ledger.folder.name == name]
    return exact[0] if exact else matches[0] if len(matches) == 1 else None


def find_artifact(index: Index, name: str) -> Artifact:
    """Return the artifact that the user names: by version, its first digits, STAGE-VERSION, or a stage's newest.

    Raises `StoreError` when there is none, or several versions begin so.
    """
    newest = _newest_first(index)
    by_stage = [artifact for artifact in newest if name in (artifact.record.stage, artifact.folder.name)]
    if by_stage:
        return by_stage[0]
    by_version = [
        artifact for artifact in newest if len(name) >= SHORTEST_PREFIX and artifact.record.version.startswith(name)
    ]
    if len(by_version) == 1:
        return by_version[0]
    if by_version:
        candidates = ", ".join(artifact.folder.name for artifact in by_version)
        raise StoreError(f"looking for `{name}`: the versions of {candidates} begin so; give more digits")
    known = {artifact.record.stage for artifact in newest} | {ledger.folder.name for ledger in ledgers()}
    raise StoreError(
        f"looking for `{name}`: no artifact or refresh is called so, nor does one version{closest(name, known)}; "
        "`lifecycle show` lists them"
    )


def refresh_as_json(record: RefreshRecord) -> dict[str, Any]:
    """Return a refresh and its stages, with everything recorded about them, as an object for `--json`."""
    fields = {name: value for name, value in vars(record).items() if name not in NOT_SHOWN_FIELDS}
    stages = {name: entry_as_json(entry) for name, entry in record.stages.items()}
    fields |= {"recipe_path": str(record.recipe_path), "process": record.process.model_dump(), "stages": stages}
    return fields | ({"layouts": as_json(rows_of(record))} if record.comparison else {})


def entry_as_json(entry: StageEntry) -> dict[str, Any]:
    """Return one stage of a refresh as an object for `--json`, with the id of the MLflow run that records it."""
    return {
        "kind": entry.kind,
        "version": entry.version,
        "state": entry.state,
        "reason": entry.reason,
        "seconds": entry.seconds,
        "work": str(entry.work) if entry.work else None,
        "artifact": str(entry.artifact) if entry.artifact else None,
        "mlflow_run_id": run_id_of(entry.attempt),
        "metrics": entry.metrics,
        "verdict": entry.verdict,
        "error": entry.error,
        "error_class": entry.error_class,
    }


def refresh_as_text(record: RefreshRecord) -> str:
    """Return a refresh and its stages as text for the terminal, with durations, metrics and errors."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started_ms / 1000))
    lines = [
        f"{record.refresh}: {state_of(record)}, began {began}, {record.seconds:.1f} s",
        f"recipe {record.recipe_path} {' '.join(record.overrides)}".rstrip(),
        f"on {record.hardware}, commit {record.git_commit or 'unknown'}",
    ]
    for name, entry in record.stages.items():
        outcome = outcome_text(entry)
        lines.append(
            f"  {name:<20} {entry.kind:<9} {entry.version}  {entry.state:<9} {entry.seconds:8.1f} s  {outcome}".rstrip()
        )
        if entry.error:
            lines.append(f"    {entry.error_class or 'error'}: {entry.error}")
    if record.comparison:
        lines.append(as_text(rows_of(record), terminal_width()))
    return "\n".join([*lines, *summary_lines(record)])


def artifact_as_json(artifact: Artifact, index: Index) -> dict[str, Any]:
    """Return an artifact as an object for `--json`: record, folder, metrics, MLflow run, an adapter's base model."""
    base = index.base_of(artifact.record)
    return {
        "folder": str(artifact.folder),
        **artifact.record.model_dump(mode="json"),
        "base": base.model_dump() if base else None,
        "metrics": final_result(artifact.folder).metrics,
        "mlflow_run_id": run_id_of(artifact.record.attempt) or artifact.record.mlflow_run_id,
    }


def artifact_as_text(artifact: Artifact, index: Index) -> str:
    """Return an artifact as text: its config, what it was built from, and its metrics."""
    record = artifact.record
    base = index.base_of(record)
    product = f"an adapter of {base.stage} {base.version}" if base else f"a {record.product}"
    lines = [
        f"{record.stage} {record.version} ({record.kind}, {product}), recipe {record.recipe}",
        f"in {artifact.folder}",
        f"built {record.finished:%Y-%m-%d %H:%M} UTC in {record.seconds:.1f} s",
        f"by commit {record.git_commit or 'unknown'}",
        f"MLflow run {run_id_of(record.attempt) or record.mlflow_run_id or 'unknown'}",
        *(f"DAMAGED: {damage}" for damage in artifact.damage),
        *([f"REFUSED: {record.finding}"] if record.finding else []),
        "built from",
        *(f"  {field}: {entry.stage} {entry.version}" for field, entry in record.upstream.items()),
        "identity",
        *(f"  {name}: {value}" for name, value in flatten(_config(artifact)).items()),
        "metrics",
        *(f"  {name}: {value:.6g}" for name, value in final_result(artifact.folder).metrics.items()),
    ]
    return "\n".join(lines)


def serve_arguments(artifact: Artifact, index: Index) -> list[str]:
    """Return arguments of `python -m stages.kinds.serve` for an artifact; StoreError if a model it needs is gone."""
    stage = artifact.record.stage
    if artifact.record.product == "model":
        return [str(artifact.folder / "model"), "--name", stage]
    if base := index.base_of(artifact.record):
        model = index.find(base.kind, base.version)
        if model is None:
            raise StoreError(
                f"serving {artifact.folder.name}: its base {base.stage}-{base.version} is not in the store"
            )
        adapter = f"{stage}={artifact.folder / ADAPTER_FOLDER}"
        return [str(model.folder / "model"), "--name", stage, "--adapter", adapter, "--base-name", base.stage]
    spec = LaunchSpec.model_validate_json((artifact.folder / LAUNCH_FILE).read_bytes())
    if spec.lost_draft:
        raise StoreError(
            f"serving {artifact.folder.name}: {spec.lost_draft}; run its refresh again, which builds that model, or "
            "serve the model itself, which then guesses no tokens ahead"
        )
    return launch_arguments(spec)


def launch_arguments(spec: LaunchSpec) -> list[str]:
    """Return the command-line arguments of `python -m stages.kinds.serve` for a launch spec, adapters included."""
    adapters = [argument for name, folder in spec.adapters.items() for argument in ("--adapter", f"{name}={folder}")]
    named = [*("--name", spec.served_name), *(("--base-name", spec.base_name) if spec.base_name else ())]
    guessing = ["--speculation", spec.speculation.model_dump_json()] if spec.speculation else []
    return [str(spec.model), *named, *adapters, "--serving", spec.serving.model_dump_json(), *guessing]


def read_now(ledger: Ledger) -> RefreshRecord:
    """Read a refresh's record, with the seconds that running stages have taken until now."""
    return with_time_so_far(ledger.read(), time.time_ns() // 1_000_000)


def state_of(record: RefreshRecord) -> str:
    """Return a refresh's state, such as `completed`; `killed` if its process died before it could record an end."""
    if record.interrupted:
        return "copied" if record.is_copied else "killed"
    return f"unknown, on {record.elsewhere}" if record.elsewhere else record.state


def _config(artifact: Artifact) -> dict[str, Any]:
    """Return the config in an artifact's cache key; for a download also its source, which the key does not contain."""
    record = artifact.record
    config = record.identity.get("config")
    shown: dict[str, Any] = dict(config) if isinstance(config, dict) else {}
    if "source" in record.tags:
        shown[record.product] = record.tags["source"]
    return shown


def _newest_first(index: Index) -> list[Artifact]:
    return sorted(index.artifacts, key=lambda one: one.record.finished, reverse=True)


def _artifact_line(artifact: Artifact) -> dict[str, Any]:
    record = artifact.record
    return {
        "stage": record.stage,
        "kind": record.kind,
        "version": record.version,
        "finished": f"{record.finished:%Y-%m-%d %H:%M}",
        "folder": str(artifact.folder),
        "damage": list(artifact.damage),
        "finding": str(artifact.record.finding) if artifact.record.finding else None,
    }


def samples_of(artifact: Artifact) -> Iterator[dict[str, Any]]:
    """Yield the first samples of each task of an evaluation, or the first episodes of a stage that keeps them.

    Raises StoreError for an artifact without any.
    """
    files = sorted((artifact.folder / "samples").glob("*.jsonl"))
    episodes = () if files else shown_episodes(artifact.folder, MOST_SAMPLES)
    samples = chain(chain.from_iterable(map(_samples_in, files)), map(_as_sample, episodes))
    first = next(samples, None)
    if first is None:
        raise StoreError(
            f"showing samples of {artifact.folder.name}: it is of kind {artifact.record.kind} and has none; name "
            "a stage of kind evaluate, or one with an environment"
        )
    yield first
    yield from samples


def _samples_in(file: Path) -> Iterator[dict[str, Any]]:
    for row in islice(read_json_lines(file), MOST_SAMPLES):
        yield {
            "file": str(file),
            "sample": row["doc_id"],
            "asked": sample_prompt(row),
            "answered": sample_answer(row["resps"]),
            "expected": str(row.get("target", "")),
            "scores": {name: row[name] for name in row.get("metrics", ()) if name in row},
        }


def _as_sample(episode: ShownEpisode) -> dict[str, Any]:
    return {
        "file": str(episode.file),
        "sample": f"{episode.place}, episode {episode.sample}",
        "asked": episode.prompt,
        "answered": episode.transcript,
        "expected": episode.reference or "",
        "scores": episode.rewards,
    }


def samples_as_text(samples: Iterable[dict[str, Any]]) -> str:
    """Return samples, or episodes, as text, one paragraph for each."""
    paragraphs = []
    for sample in samples:
        scores = ", ".join(f"{name} {value}" for name, value in sample["scores"].items())
        lines = [f"{sample['file']}, sample {sample['sample']}: {scores}"]
        lines += [f"  {part}: {quoted(sample[part], SHOWN_CHARACTERS)}" for part in ("asked", "answered", "expected")]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)
