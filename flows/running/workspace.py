"""Work folder of a stage: prepared before an attempt, and moved into the store as the stage's artifact after success.

config.json, metrics.jsonl, …  see `stages/core/contract.py`
log.txt                        output of all processes of all attempts
attempt.json                   identifies the processes of this attempt, should this process die
"""

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flows.launch.cluster import cancel_left_over
from flows.ledger.provenance import git_commit, package_versions
from flows.planning.contamination import contamination_warnings
from flows.planning.plan import PlannedStage
from flows.store.content import ATTEMPT_FILE, LOG_FILE, SCRATCH_FOLDER, SERIES, content_digest, hash_files
from flows.store.record import Artifact, Record, UpstreamEntry
from flows.store.store import Store
from stages.core.contract import Lease, StageInput, StageResult, StrictModel, Trial
from stages.core.files import write_atomically
from stages.core.process_tree import end_processes, marked_processes

KEPT = frozenset({SCRATCH_FOLDER, *SERIES, LOG_FILE})
"""Files that a new attempt keeps in the work folder; others go, so that no old result gets into the artifact."""


@dataclass(frozen=True)
class ResolvedInputs:
    """Resolved inputs of a stage: artifact folders and servers by stage name, upstream versions by config field."""

    inputs: dict[str, Path]
    leases: dict[str, Lease]
    upstream: dict[str, UpstreamEntry]

    @property
    def digests(self) -> dict[str, str]:
        """Return the content hash of each input, by config field."""
        return {field: entry.digest for field, entry in self.upstream.items()}


class AttemptNote(StrictModel):
    """Contents of `attempt.json`: the token that marks an attempt's processes, and the content hashes of its inputs."""

    token: str | None
    digests: dict[str, str]


def discard(store: Store, work: Path) -> None:
    """Remove a stage's work folder, once nothing that a dead flow left is at work there. Call it under the lock."""
    _end_left_over(work)
    store.remove(work)


def prepare(store: Store, planned: PlannedStage, resolved_inputs: ResolvedInputs) -> bool:
    """Prepare a stage's work folder and write its `config.json`; return whether an earlier attempt left scratch files.

    Ends processes and jobs that a dead flow may have left at work there. Scratch is kept unless it was made
    from other content. Call it under the lock.
    """
    work = store.work_folder(planned.kind, planned.name, planned.resume_key)
    note = _end_left_over(work)
    # Without a note, nothing says from which content the scratch files were made.
    if work.exists() and (note is None or note.digests != resolved_inputs.digests):
        store.remove(work)
    store.make_folder(work)
    with store.explained(f"prepare {work}"):
        _remove_all_but(work, KEPT)
        # Without a token yet: if this process dies before the stage starts, the next attempt still knows the content.
        note_attempt(work, resolved_inputs, None)
        write_atomically(work / "config.json", stage_input(store, planned, resolved_inputs).model_dump_json(indent=2))
        return any((work / SCRATCH_FOLDER).glob("*"))


def _end_left_over(work: Path) -> AttemptNote | None:
    """End the processes and jobs of a dead flow in a work folder; return the note that it left there."""
    note = AttemptNote.read_or_none(work / ATTEMPT_FILE)
    if note and note.token:
        token = note.token
        end_processes(lambda: marked_processes(token))
        # After the processes, since the agent among them might submit another job.
        cancel_left_over(work)
    return note


def note_attempt(work: Path, resolved_inputs: ResolvedInputs, token: str | None) -> None:
    """Write `attempt.json`, which lets the next attempt find this attempt's processes and compare the inputs."""
    write_atomically(work / ATTEMPT_FILE, AttemptNote(token=token, digests=resolved_inputs.digests).model_dump_json())


def commit(
    store: Store,
    planned: PlannedStage,
    resolved_inputs: ResolvedInputs,
    result: StageResult,
    *,
    seconds: float,
    attempt: str | None,
) -> Artifact:
    """Move a finished stage's work folder into the store as its artifact. attempt: the ledger's key."""
    work = store.work_folder(planned.kind, planned.name, planned.resume_key)
    with store.explained(f"hash the files of {planned.name}"):
        files = hash_files(work)
    finished = datetime.now(UTC)
    record = Record(
        recipe=planned.recipe,
        stage=planned.name,
        kind=planned.kind,
        product=planned.config.product,
        version=planned.version,
        identity=planned.identity,
        upstream=resolved_inputs.upstream,
        digest=content_digest(planned.config.product, files),
        files=files,
        tags=result.tags,
        attempt=attempt,
        started=finished - timedelta(seconds=seconds),
        finished=finished,
        seconds=seconds,
        packages=package_versions(),
        git_commit=git_commit(),
    )
    return store.commit(work, record)


def stage_input(
    store: Store, planned: PlannedStage, resolved_inputs: ResolvedInputs, trial: Trial | None = None
) -> StageInput:
    """Return the content of a stage process's `config.json`. trial: run only the first steps, for a comparison."""
    outside = planned.identity["outside"]
    assert isinstance(outside, dict)
    return StageInput(
        name=planned.name,
        kind=planned.kind,
        version=planned.version,
        # The launcher hands over the environment, which may hold secrets; this file becomes part of the artifact.
        config=planned.config.model_dump(mode="json", exclude={"execution": {"environment"}}),
        inputs=resolved_inputs.inputs,
        leases=resolved_inputs.leases,
        outside=outside,
        trial=trial,
        warnings=tuple(contamination_warnings(planned.identity, resolved_inputs.upstream, store.find)),
        cache=store.make_folder(store.cache_folder(planned.kind)),
    )


def _remove_all_but(work: Path, kept: frozenset[str]) -> None:
    for path in work.iterdir():
        if path.name in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
