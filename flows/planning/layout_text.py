"""Parser of parallel layouts written as one line, such as `megatron tp=2 dp_shard=4`, into engine and layout fields.

A line contains what a recipe has under `engine:` and `layout:`, with the same defaults. Only the engine may be omitted,
where the fields show which it is.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

from flows.recipe.text import closest, parse_yaml
from stages.core.redaction import shortened
from stages.parallel.engines.registry import RULES
from stages.parallel.layout import ENGINES, EngineName

LEFT_OUT = (1, False)
"""Values of a layout field that switch it off. An engine that does not have the field accepts these values."""


def line_problems(line: str, keys: Collection[str]) -> Iterator[str]:
    """Yield the problems of a layout written as one line, such as an unknown field."""
    words = _words(line)
    if not words or ("=" not in words[0] and words[0] not in (*ENGINES, *keys)):
        engine = words[0] if words else ""
        yield f"found `{shortened(engine, 60)}`, which is no engine and no file{closest(engine, ENGINES)}"
        words = words[1:]
    pairs = [word for word in words if word not in ENGINES]
    if len(words) - len(pairs) > 1:
        yield f"it names {len(words) - len(pairs)} engines; expected one"
    names = [pair.partition("=")[0] for pair in pairs]
    for pair, name in zip(pairs, names, strict=True):
        if name not in keys:
            yield f"unknown key `{shortened(name, 60)}`{closest(name, keys)}"
        elif not pair.partition("=")[2]:
            yield f"found `{shortened(pair, 60)}`, expected KEY=VALUE, such as dp_shard=2"
    yield from (f"`{name}` is said twice" for name in keys if names.count(name) > 1)


def engine_and_fields(line: str) -> tuple[EngineName, dict[str, Any]]:
    """Parse a line such as `megatron tp=2` that has passed `line_problems` into engine and unvalidated YAML values."""
    words = _words(line)
    pairs = [word.partition("=") for word in words if word not in ENGINES]
    fields = {name: parse_yaml(text) for name, _, text in pairs}
    named = next((engine for engine in ENGINES if engine in words), None)
    # `tp=1` is no reason to take the engine that has tensor parallelism; `true`, which equals 1, is one.
    used = {name for name, value in fields.items() if value is True or value not in LEFT_OUT}
    default, *others = ENGINES
    implied = (engine for engine in others if used & {*RULES[engine].own_fields} - {*RULES[default].own_fields})
    by_fields: EngineName = next(implied, default)
    return named or by_fields, fields


def _words(line: str) -> list[str]:
    return [word.removeprefix("engine=") for word in re.split(r"[,\s]+", line.strip()) if word]
