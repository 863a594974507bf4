"""Approval of a promotion by a person: whether it is awaited, given or refused, in a file of the promotion's artifact.

The file is no content of the artifact: it is written after the commit, and a verdict that is judged again has none.
"""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from stages.core.contract import StageResult
from stages.core.fields import StrictModel

APPROVAL_FILE = "approval.json"
VERDICT_TAG = "verdict"
PROMOTED, REFUSED = "promoted", "not promoted"
AWAITED = "waiting for approval"
"""Values of the tag `verdict` of a promotion's result: gates kept, and kept while a person has yet to approve it."""
MS_PER_HOUR = 3_600_000
DEFAULT_HOURS = 168.0
"""Hours in which a person decides about a candidate, a week."""
GROUP_NAME = r"^[^\s,]([^,\r\n]*[^\s,])?$"
"""Pattern of a group's name; several are written with commas between them."""


class ApprovalConfig(StrictModel):
    """People who must approve a candidate that keeps all gates, before it becomes champion."""

    by: tuple[Annotated[str, Field(pattern=GROUP_NAME, max_length=128)], ...] = Field(
        min_length=1,
        description="Groups of the operating system, or of a signing-in proxy; a member of any of them decides.",
    )
    within_hours: PositiveFloat = Field(
        DEFAULT_HOURS, description="Hours to decide; after that, the candidate counts as rejected."
    )


class Approval(StrictModel):
    """Content of `approval.json`: who may approve a promotion and until when, and who decided what, when and why.

    The times are in milliseconds since the epoch. decided_by: None before a decision.
    """

    groups: tuple[str, ...]
    asked_ms: int
    until_ms: int
    decision: Literal["approved", "rejected"] | None = None
    decided_by: str | None = None
    decided_ms: int | None = None
    why: str = ""

    @property
    def is_late(self) -> bool:
        """Return whether the time for a decision is over without one, which counts as a rejection."""
        return self.decision is None and time.time() * 1000 >= self.until_ms

    @property
    def is_awaited(self) -> bool:
        return self.decision is None and not self.is_late

    @property
    def text(self) -> str:
        """Return a phrase on the decision, or on whom it waits for, with times in UTC."""
        if self.decided_by is not None and self.decided_ms is not None:
            return f"was {self.decision} by {self.decided_by} on {_utc(self.decided_ms)}: {self.why}"
        groups = " or ".join(self.groups)
        verb = "was not approved" if self.is_late else "waits for approval"
        return f"{verb} by {groups} until {_utc(self.until_ms)}"

    @property
    def tags(self) -> dict[str, str]:
        """Return the tags that replace those of the promotion's result."""
        verdict = PROMOTED if self.decision == "approved" else AWAITED if self.is_awaited else REFUSED
        return {VERDICT_TAG: verdict, "approval": self.text}


def read_approval(artifact: Path) -> Approval | None:
    """Return the approval of a promotion's artifact; None for one that needs none."""
    try:
        return Approval.model_validate_json((artifact / APPROVAL_FILE).read_bytes())
    except FileNotFoundError:
        return None


def read_result(artifact: Path) -> StageResult:
    """Return the `result.json` of an artifact, with the tags that the decision of a person has changed since.

    Raises OSError or ValueError for files that cannot be read.
    """
    result = StageResult.model_validate_json((artifact / "result.json").read_bytes())
    approval = read_approval(artifact)
    return result.model_copy(update={"tags": {**result.tags, **approval.tags}}) if approval else result


def _utc(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC"
