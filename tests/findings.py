"""Findings of stages that tests run in their own process: raised as the flow raises them after the commit."""

from stages.core.contract import StageContext


def raise_findings(context: StageContext) -> None:
    """Raise the first finding, by which a stage refuses its own result, if there is one."""
    for finding in context.findings:
        raise finding
