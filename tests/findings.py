"""Findings of stages that tests run in their own process: raised as the flow raises them after the commit."""

from stages.core.contract import StageContext


def raise_findings(context: StageContext) -> None:
    """Raise the first finding with which a stage refuses what it made, if there is one."""
    for finding in context.findings:
        raise finding
