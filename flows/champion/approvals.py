"""Approvals of promotions: the question, the decision of a person, and the news for refreshes that ended waiting.

No process waits. The decision is a file of the promotion's artifact (`stages/core/approval.py`), which the hook reads.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flows.champion.registrations import promotion_lock
from flows.champion.registry import RegisteredVersion, Registry
from flows.champion.retention import reach
from flows.ledger.events import PromotionDecided, now_ms
from flows.ledger.home import store_root
from flows.ledger.people import Person, user_of_this_process
from flows.ledger.refreshes import Ledger, ledgers
from flows.planning.plan import PlannedStage
from flows.recipe.version import resume_key_of
from flows.running.outcome import leave_report
from flows.running.runner import BuiltStage, run_stage
from flows.servers.programs import PREFECT
from flows.store.content import is_pending
from flows.store.record import Artifact, Index
from flows.store.store import Store
from stages.core.approval import (
    APPROVAL_FILE,
    DEFAULT_HOURS,
    MS_PER_HOUR,
    VERDICT_TAG,
    Approval,
    ApprovalConfig,
    read_approval,
)
from stages.core.contract import StageInput
from stages.core.errors import ApprovalError, ServerError, StoreError
from stages.core.files import write_atomically
from stages.core.lines import say
from stages.core.redaction import quoted
from stages.kinds.registry import KINDS

LONGEST_REASON = 1000
NO_PERSON = "no one"
MOST_VERDICTS = 3
"""Times that a candidate is judged again, since another became champion meanwhile, before its approval is given up."""
Decided = Literal["approved", "rejected"]


@dataclass(frozen=True)
class Candidate:
    """Promotion that keeps all gates and waits for a person: its artifact, and the approval that it waits for."""

    artifact: Artifact
    name: str
    approval: Approval

    @property
    def version(self) -> str:
        return self.artifact.record.version

    @property
    def text(self) -> str:
        return f"version {self.version} of {self.name} {self.approval.text}"


def asked_groups(artifact: Path) -> tuple[str, ...]:
    """Return the groups whom the recipe of a promotion asks for approval; may be empty."""
    asked = _asked(artifact)
    return asked.by if asked else ()


def ask(artifact: Path, groups: tuple[str, ...]) -> Approval:
    """Record that a promotion waits from now on for approval by one of the groups.

    They are those who approve the present champion, if somebody does, so that a recipe without `approval`, or with
    other groups, takes effect with its first approved candidate only.
    """
    asked, present_ms = _asked(artifact), now_ms()
    hours = asked.within_hours if asked else DEFAULT_HOURS
    return _write(
        artifact, Approval(groups=groups, asked_ms=present_ms, until_ms=present_ms + round(hours * MS_PER_HOUR))
    )


def over(artifact: Path) -> Approval | None:
    """Return the approval of a promotion, None if none is needed; one that is late is recorded as a rejection."""
    approval = read_approval(artifact)
    if approval is None or not approval.is_late:
        return approval
    return _write(artifact, _decision(approval, "rejected", NO_PERSON, "the time to approve it was over"))


def tell_refreshes(artifact: Path, tags: dict[str, str]) -> None:
    """Record a decision in the ledgers and reports of all refreshes that ended waiting for it. tags: of the result."""
    for ledger in _waiting_ledgers():
        try:
            record = ledger.read()
        except StoreError as error:  # another one's damage is no reason to stop here
            say(f"warning: passing over a refresh: {str(error).splitlines()[0]}", sys.stderr)
            continue
        decided = [stage for stage, entry in record.stages.items() if entry.artifact == artifact]
        for stage in decided:
            ledger.append(PromotionDecided(stage=stage, tags=tags))
        if decided:
            leave_report(ledger.read(), Store(store_root()))


def awaited(index: Index, name: str | None = None) -> Iterator[Candidate]:
    """Yield the promotions of the store that wait for approval, of one registered model or of all."""
    for artifact in index.of_product("verdict"):
        approval = read_approval(artifact.folder) if artifact.pending else None
        if approval and approval.is_awaited and name in (None, _name(artifact)):
            yield Candidate(artifact, _name(artifact), approval)


def decide(name: str, version: str | None, decision: Decided, person: Person, why: str) -> Path:
    """Approve or reject a promotion that waits, and have its hook do what follows; return its artifact after that.

    A candidate whose opponent is no longer the champion is judged again; the approval is good for it while all gates
    hold. A decision that a kill cut short is completed by the next call of the same. Raises ApprovalError when there is
    nothing to decide or the person may not, else what `run_stage` raises.
    """
    store = Store(store_root())
    why = reason(why)
    candidate = _find(store.index(), name, version)
    folder = candidate.artifact.folder
    person.check_membership(candidate.approval.groups, f"version {candidate.version} of {name}")
    planned, upstream = _as_planned(store, candidate.artifact)
    _decide(name, folder, decision, person, why)
    waiting = [*_waiting_ledgers()]
    for _ in range(MOST_VERDICTS):
        built = run_stage(planned, upstream, store, _Quiet(candidate.artifact.record.attempt))
        approval = read_approval(built.artifact)
        if decision == "rejected" or approval is None or not approval.is_awaited:
            _settle_flow_runs(waiting)
            return built.artifact
        # Judged again, against another champion, and all gates hold.
        _decide(name, built.artifact, decision, person, why)
    raise ApprovalError(f"approving {name}: its champion changes all the time; try again when no other is promoted")


def _settle_flow_runs(waiting: Iterable[Ledger]) -> None:
    """Have Prefect show, and notify of, what became of refreshes that ended waiting; warn where it cannot be reached.

    A copied home leaves the flow runs of its original alone.
    """
    records = []
    for ledger in waiting:
        with suppress(StoreError):  # a damaged one
            records.append(ledger.read())
    # One that is running has been tried again meanwhile.
    settled = [
        one for one in records if one.state not in ("running", "waiting_for_approval") and one.prefect_flow_run_id
    ]
    if not settled:
        return
    try:
        is_ours = reach(PREFECT)
        from flows.running.flow_runs import settle_flow_runs

        settle_flow_runs([record for record in settled if is_ours or not record.is_copied])
    except ServerError as error:
        say(f"warning: Prefect goes on showing that these wait for approval: {error}", sys.stderr)


def reason(why: str) -> str:
    """Return a reason on one line. Raises ApprovalError for none, or one that is too long."""
    words = " ".join(why.split())
    if not words or len(words) > LONGEST_REASON:
        raise ApprovalError(
            f"deciding about a champion: the reason has {len(words)} characters; expected 1 to {LONGEST_REASON}"
        )
    return words


def approve_change(registry: Registry, version: RegisteredVersion, what: str, why: str | None) -> str:
    """Check that this process's user may do `what`; return the text that records it, "" without approvers.

    Raises ApprovalError for a user who may not, or gives no reason.
    """
    groups = registry.approvers(version.name)
    if not groups:
        return ""
    person = user_of_this_process()
    person.check_membership(groups, f"{what} of {version.name}")
    if why is None:
        raise ApprovalError(f"{what} of {version.name} needs a reason, since its champions are approved: add --why")
    present_ms = now_ms()
    asked = Approval(groups=groups, asked_ms=present_ms, until_ms=present_ms)
    return f"{what} {_decision(asked, 'approved', person.name, reason(why)).text}"


def _find(index: Index, name: str, version: str | None) -> Candidate:
    waiting = list(awaited(index, name))
    found = [one for one in waiting if one.version == version]
    if found:
        return found[0]
    known = "; ".join(one.text for one in waiting) or f"nothing of {name} waits for approval"
    if version is None:
        raise ApprovalError(f"say which version of {name} is meant: {known}")
    artifact = next((one for one in index.of_product("verdict") if one.record.version == version), None)
    if artifact is None or _name(artifact) != name:
        gone = f"no promotion of {name} in the store has the version {quoted(version, 60)}"
        raise ApprovalError(f"{gone}; it was never judged, or removed since: {known}")
    approval = read_approval(artifact.folder)
    if approval is None:
        raise ApprovalError(
            f"version {version} of {name} waits for no approval: it is {artifact.record.tags.get(VERDICT_TAG)}"
        )
    if approval.is_late:
        raise ApprovalError(f"version {version} of {name} {approval.text}, and counts as rejected; judge it again")
    if artifact.pending:
        # A kill came between the decision and the hook.
        return Candidate(artifact, name, approval)
    raise ApprovalError(f"version {version} of {name} {approval.text}; to change that, judge it again")


def _decide(name: str, artifact: Path, decision: Decided, person: Person, why: str) -> None:
    """Write a decision, the first of which counts; the same one again is left as it is."""
    with promotion_lock(name):
        approval = read_approval(artifact)
        if approval is None or approval.is_late or not is_pending(artifact):
            raise ApprovalError(f"{artifact} waits for no decision any more")
        if approval.decision is None:
            _write(artifact, _decision(approval, decision, person.name, why))
        elif approval.decision != decision:
            raise ApprovalError(f"it {approval.text} already")


def _decision(approval: Approval, decision: Decided, by: str, why: str) -> Approval:
    return approval.model_copy(update={"decision": decision, "decided_by": by, "decided_ms": now_ms(), "why": why})


def _write(artifact: Path, approval: Approval) -> Approval:
    write_atomically(artifact / APPROVAL_FILE, approval.model_dump_json(indent=1))
    return approval


def _asked(artifact: Path) -> ApprovalConfig | None:
    asked = _input(artifact).config.get("approval")
    return ApprovalConfig.model_validate(asked) if asked else None


def _name(promotion: Artifact) -> str:
    """Return the name of the registered model that a promotion is about."""
    return promotion.record.tags["registered_model"]


def _input(artifact: Path) -> StageInput:
    return StageInput.model_validate_json((artifact / "config.json").read_bytes())


def _waiting_ledgers() -> Iterator[Ledger]:
    for ledger in ledgers():
        try:
            if ledger.ends_waiting():
                yield ledger
        except FileNotFoundError:  # removed meanwhile
            continue


def _as_planned(store: Store, promotion: Artifact) -> tuple[PlannedStage, dict[str, BuiltStage]]:
    """Return the planned stage that made a promotion, and its inputs, so that its hook can run or it is judged again.

    Raises ApprovalError when an input is no longer in the store, or another one took its place.
    """
    record, given = promotion.record, _input(promotion.folder)
    config = KINDS[record.kind].model_validate(given.config)
    index = store.index()
    inputs = {artifact.record.stage: artifact for artifact in index.closure(promotion) if artifact != promotion}
    for entry in record.upstream.values():
        found = inputs.get(entry.stage)
        if found is None or found.record.digest != entry.digest or found.damage:
            gone = "is no longer in the store" if found is None else "is not what was judged"
            raise ApprovalError(
                f"version {record.version} of {_name(promotion)} cannot be promoted: {entry.stage}-{entry.version} "
                f"{gone}; run its recipe again, which builds and judges it again"
            )
    versions = {entry.stage: entry.version for entry in record.upstream.values()}
    outside: Any = record.identity["outside"]
    ancestors = tuple(name for name in given.inputs if name in inputs)
    planned = PlannedStage(
        recipe=record.recipe or "",
        name=record.stage,
        kind=record.kind,
        version=record.version,
        resume_key=resume_key_of(config, versions, outside),
        identity=record.identity,
        config=config,
        upstream=tuple(versions),
        ancestors=ancestors,
        action="run",
        reason="decided",
    )
    built = {
        name: BuiltStage(name, one.record.kind, one.record.version, "cached", 0.0, one.folder, one.record)
        for name, one in inputs.items()
    }
    return planned, built


class _Quiet:
    """Observer of a promotion that is completed outside any refresh, for the attempt that judged it first."""

    def __init__(self, attempt: str | None) -> None:
        self._attempt = attempt

    def waiting(self) -> None:
        pass

    def started(self, attempt: object) -> str | None:
        return self._attempt

    def tick(self) -> None:
        pass

    def ended(self, end: object) -> None:
        pass
