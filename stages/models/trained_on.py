"""What a model was trained on last: conversations or plain texts. Noted in its folder, and copied with it."""

from __future__ import annotations

import json
from pathlib import Path

from stages.core.files import write_atomically

TRAINED_ON_FILE = "trained_on.json"


def note_trained_on(folder: Path, *, conversations: bool) -> None:
    """Write it beside the weights, from where exports and quantizers copy it."""
    write_atomically(folder / TRAINED_ON_FILE, json.dumps({"conversations": conversations}))


def has_chat_template(folder: Path) -> bool:
    """Whether a model folder's tokenizer can render conversations."""
    tokenizer_config = folder / "tokenizer_config.json"
    in_config = tokenizer_config.is_file() and json.loads(tokenizer_config.read_text()).get("chat_template")
    return bool(in_config) or (folder / "chat_template.jinja").is_file()


def trained_on_conversations(folder: Path) -> bool | None:
    """What was noted; None for a model that was trained elsewhere."""
    noted = folder / TRAINED_ON_FILE
    return bool(json.loads(noted.read_text())["conversations"]) if noted.is_file() else None
