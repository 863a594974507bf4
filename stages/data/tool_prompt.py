"""One prompt with tools of a dataset, as training learned it: a server has to render it to the same tokens."""

from __future__ import annotations

from typing import Any

from stages.core.strict import StrictModel


class ToolPrompt(StrictModel):
    """Messages that end with a question or a tool's answer, and the tokens that training made of them.

    tools: as the template got them. variables: of the chat template. token_ids: of the messages, and of the beginning
    of the answer after them.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    token_ids: list[int]
