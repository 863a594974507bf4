"""Helper for tests that run a stage in their own process: raises the errors with which a stage rejects its result."""

from stages.core.contract import StageContext


def raise_findings(context: StageContext) -> None:
    """Raise the first error with which the stage rejected its own result, if there is one."""
    for finding in context.findings:
        raise finding
