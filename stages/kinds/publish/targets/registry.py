"""Registry of publishing targets, by URL scheme; a new kind is a module with `open_target` and one line here.

Light: a target's module is imported when something is to be published there.
"""

import importlib
import re
from dataclasses import dataclass

from stages.core.redaction import quoted
from stages.kinds.publish.targets.target import Address, Target

MAX_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class TargetEntry:
    """Kind of publishing target: the form of its addresses, its module, and the variable with its token.

    form: text after the scheme, for messages. pattern: the same, as a regular expression.
    """

    form: str
    pattern: re.Pattern[str]
    module: str
    token: str | None = None
    is_hub: bool = False


_REPOSITORY = re.compile(r"(?!\.+/)[\w.-]+/(?!\.+$)[\w.-]+")
_PREFIX = re.compile(r"[a-z0-9][a-z0-9.-]*(/(?!\.{1,2}(/|$))[^/\s]+)+")
_LARGEST_PORT = 65535
_IMAGE = re.compile(r"[\w.-]+(:(?P<port>[0-9]+))?/[a-z0-9._/-]+:\w[\w.-]{0,127}")
TARGETS: dict[str, TargetEntry] = {
    "hf": TargetEntry("owner/name", _REPOSITORY, "huggingface", "HF_TOKEN", is_hub=True),
    "modelscope": TargetEntry("owner/name", _REPOSITORY, "modelscope", "MODELSCOPE_API_TOKEN", is_hub=True),
    "file": TargetEntry("/PATH", re.compile(r"/[^\0-\x1f\x7f]*[^/\0-\x1f\x7f]"), "folder"),
    "s3": TargetEntry("bucket/prefix", _PREFIX, "bucket"),
    "gs": TargetEntry("bucket/prefix", _PREFIX, "bucket"),
    "az": TargetEntry("container/prefix", _PREFIX, "bucket"),
    "oci": TargetEntry("host/name:tag", _IMAGE, "oci"),
}


def parse_address(text: str) -> Address:
    """Parse the address in a recipe's field `to`. Raises ValueError that names the allowed forms."""
    scheme, separator, place = text.partition("://")
    entry = TARGETS.get(scheme) if separator else None
    match = entry.pattern.fullmatch(place) if entry else None
    if entry is None or match is None:
        raise ValueError(f"{quoted(text, MAX_SHOWN_CHARACTERS)} is no place to publish to; write {forms()}")
    port = match.groupdict().get("port")
    if port and not (len(port) <= len(str(_LARGEST_PORT)) and 0 < int(port) <= _LARGEST_PORT):
        raise ValueError(
            f"{quoted(text, MAX_SHOWN_CHARACTERS)} is no place to publish to: a port is 1 to {_LARGEST_PORT}"
        )
    return Address(scheme, place, entry.is_hub)


def forms() -> str:
    """Return the allowed forms of publishing addresses, such as `hf://owner/name`, for error messages."""
    written = [f"{scheme}://{entry.form}" for scheme, entry in TARGETS.items()]
    return f"{', '.join(written[:-1])} or {written[-1]}"


def token_of(address: Address) -> str | None:
    """Return the name of the environment variable with a publishing target's token; None if it needs none."""
    return TARGETS[address.scheme].token


def target_of(address: Address, *, private: bool) -> Target:
    """Open the publishing target at an address."""
    module = importlib.import_module(f"stages.kinds.publish.targets.{TARGETS[address.scheme].module}")
    target: Target = module.open_target(address, private=private)
    return target
