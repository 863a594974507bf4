"""What a model was trained on last: conversations or plain texts, and on which date. Noted in its folder, and copied
with it.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

from stages.core.files import write_atomically

TRAINED_ON_FILE = "trained_on.json"


def note_trained_on(folder: Path, *, conversations: bool, template_date: date | None = None) -> None:
    """Write it beside the weights, from where exports and quantizers copy it.

    template_date: what its chat template took for the current date; None for the default.
    """
    noted = {"conversations": conversations}
    dated = {"template_date": template_date.isoformat()} if template_date else {}
    write_atomically(folder / TRAINED_ON_FILE, json.dumps({**noted, **dated}))


def has_chat_template(folder: Path) -> bool:
    """Whether a model folder's tokenizer can render conversations."""
    tokenizer_config = folder / "tokenizer_config.json"
    in_config = tokenizer_config.is_file() and json.loads(tokenizer_config.read_text()).get("chat_template")
    return bool(in_config) or (folder / "chat_template.jinja").is_file()


def trained_on_conversations(folder: Path) -> bool | None:
    """What was noted; None for a model that was trained elsewhere."""
    noted = folder / TRAINED_ON_FILE
    return bool(json.loads(noted.read_text())["conversations"]) if noted.is_file() else None


def is_asked_as_chat(folder: Path) -> bool:
    """Whether plain text is asked as by a user of a chat: as the model was trained, else if it has a template."""
    trained = trained_on_conversations(folder)
    return has_chat_template(folder) if trained is None else trained


def noted_date(folder: Path) -> date | None:
    """The date that the chat template is to take for the current one, as in training; None for the default."""
    noted = folder / TRAINED_ON_FILE
    found = json.loads(noted.read_text()).get("template_date") if noted.is_file() else None
    return date.fromisoformat(found) if found else None
