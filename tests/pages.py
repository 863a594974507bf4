"""Generator of tables and command outputs on documentation pages; outputs measured on a stated date are only checked.

A comment above a table or a console block says where it comes from:

    <!-- fields train.layout -->            the fields of that block of a recipe, from the models in the code
    <!-- exit codes -->, <!-- rewards -->, …  other tables: `WRITERS`
    <!-- run -->                           a console block whose commands take seconds; their output follows them
    <!-- measured 2026-11-21 -->           a console block whose commands take minutes, or an idle machine
    <!-- measured 2026-11-21: COMMAND -->  a table that such a command prints

python tests/pages.py [--page PAGE]         # write again all but the last; unit tests hold that this changes nothing
python tests/pages.py --measured [WORDS]    # run the last, if WORDS are in the command; name lines no longer printed
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, get_args, get_origin
from unittest.mock import patch

from click.testing import CliRunner
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from flows.cli.main import cli  # noqa: E402
from flows.cli.main import main as lifecycle  # noqa: E402
from flows.recipe.recipe import load_recipe  # noqa: E402
from stages.core.contract import Execution  # noqa: E402
from stages.core.errors import error_classes  # noqa: E402
from stages.core.fields import OutsideInput, Reference, find_marker, models_in  # noqa: E402
from stages.data.formats import FORMATS  # noqa: E402
from stages.kinds.registry import KINDS  # noqa: E402
from stages.rewards.registry import REWARDS  # noqa: E402
from stages.rewards.reward import Reward  # noqa: E402
from tests import matrix  # noqa: E402
from tests.metric_names import markdown_table  # noqa: E402
from tests.nightly.parts import table  # noqa: E402
from tests.zoo import table as zoo  # noqa: E402

FOLDERS = ("configs", "flows", "stages", "deploy", "tests")
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))),
]
SHOWN = re.compile(
    r"^<!-- (?P<kind>fields|rewards|exit codes|names|graph|engines|families|formats|matrix|nightly|run|measured) ?"
    r"(?P<argument>.*?) ?-->\n"
    r"(?P<body>```[\s\S]*?^```$|(?:^\|.*\n?)+)",
    re.MULTILINE,
)
MEASURED = re.compile(r"(\d{4}-\d\d-\d\d)(?:: (.+))?")
END_OF_OUTPUT = "-- here ends the output of a command of a page --"
NO_ANSWER = "no answer within"
"""Text in the output of `lifecycle plan` if it timed out on a busy machine; the command is then repeated."""
NUM_TRIES = 10
ENGINES_ON = {
    "qwen2.5-7b": [8],
    "llama-3-8b": [8],
    "qwen2.5-32b": [64],
    "llama-3-70b": [64, 128],
    "llama-3.1-405b": [512],
}
LEARNERS = {
    "examples": "SFT, distill",
    "pairs": "DPO, SimPO, ORPO, CPO, reward",
    "labelled": "KTO",
}
"""Training methods that learn from each kind of rows, for the documentation's table of dataset formats."""


def shown_in(page: Path) -> list[re.Match[str]]:
    """Return the generated blocks of a Markdown page as regex matches with the groups `kind`, `argument` and `body`."""
    return list(SHOWN.finditer(page.read_text(encoding="utf-8")))


def rewritten(page: Path) -> str:
    """Return a Markdown page's text with all generated blocks generated again."""

    def write(match: re.Match[str]) -> str:
        kind, argument, body = match.groups()
        if kind == "measured":
            return match[0]
        new = _run(body) if kind == "run" else WRITERS[kind](argument)
        new = re.sub(r"\(#([\w-]+)\)", lambda link: f"({anchor(link[1], page)})", new)
        return match[0].removesuffix(body) + new + "\n" * body.endswith("\n")

    return SHOWN.sub(write, page.read_text(encoding="utf-8"))


def anchor(name: str, page: Path) -> str:
    """Return a Markdown link to the heading `name`, on the same page or else on another page of its folder."""
    pages = sorted(page.parent.glob("*.md"), key=lambda other: (other != page, other.name == "README.md", other))
    for other in pages:
        if re.search(rf"^#+ {re.escape(name)}$", other.read_text(encoding="utf-8"), re.MULTILINE):
            return f"#{name}" if other == page else f"{other.name}#{name}"
    raise ValueError(f"writing {page}: no page of its folder has a heading {name!r}")


def num_own_words(page: Path) -> int:
    """Return the number of hand-written words of a Markdown page, without code and generated blocks."""
    return len(
        re.sub(r"^```[\s\S]*?^```$", "", SHOWN.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE).split()
    )


def commands_of(console: str) -> list[str]:
    """Return the commands in a documentation page's console block: the text after `$ `, with continuation lines."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)$", console, re.MULTILINE)


def commands_measured(shown: re.Match[str]) -> list[str]:
    """Return the commands whose output a block shows as measured on a stated date; they are not run again."""
    said = MEASURED.fullmatch(shown["argument"]) if shown["kind"] == "measured" else None
    return [] if not said else [said[2]] if said[2] else commands_of(shown["body"])


def run(command: str) -> str:
    """Run a bash command with `lifecycle` on the PATH, and return its output."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["bash", "-c", f"exec 2>&1\n{command}"]
    return subprocess.run(words, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE).stdout


def _run(console: str) -> str:
    """Run a console block's commands in a new home, in a folder of links to this repository; return the new block."""
    commands = commands_of(console)
    for _ in range(NUM_TRIES):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for entry in ROOT.iterdir():
                (folder / entry.name).symlink_to(entry)
            printed = _run_here(f"\necho '{END_OF_OUTPUT}'\n".join(commands), folder)
        if NO_ANSWER not in printed:
            break
    lines = [
        "\n".join(filter(None, (f"$ {command}", output.strip("\n"))))
        for command, output in zip(commands, printed.split(END_OF_OUTPUT), strict=True)
    ]
    return "\n".join(["```console", *lines, "```"])


def _run_here(commands: str, folder: Path) -> str:
    """Run bash commands in a folder, each `lifecycle` among them in this process, which has imported what they need.

    bash hands the arguments over in one pipe and gets the output from another; the last ones are none.
    """
    asked, answered = folder / ".asked", folder / ".answered"
    for pipe in (asked, answered):
        os.mkfifo(pipe)
    function = f"lifecycle() {{ printf '%s\\0' \"$@\" > {asked}; cat {answered}; }}"
    words = ["bash", "-c", f"exec 2>&1\ntrap ': > {asked}' EXIT\n{function}\n{commands}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (
        patch.dict(os.environ, LIFECYCLE_HOME=str(folder / "home"), PATH=path),
        tempfile.TemporaryFile("w+") as printed,
        chdir(folder),
    ):
        with subprocess.Popen(words, stdout=printed):
            while arguments := asked.read_text().split("\0")[:-1]:
                output = StringIO()
                with redirect_stdout(output), redirect_stderr(output), suppress(SystemExit):
                    lifecycle(arguments)
                with suppress(BrokenPipeError):  # of `head`, which has what it wants
                    answered.write_text(output.getvalue())
        printed.seek(0)
        return printed.read()


def blocks(path: str) -> Iterator[str]:
    """Yield the path of a recipe's config block, such as `train`, and of all blocks in it, such as `train.layout`."""
    yield path
    for name in [*own_fields(block(path)), *({"execution"} & block(path).model_fields.keys())]:
        annotation = block(path).model_fields[name].annotation
        # what names several kinds has a table of its own
        if (models := models_in(annotation)) and (get_origin(annotation) is not dict or len(models) == 1):
            yield from blocks(f"{path}.{name}")


def own_fields(model: type[BaseModel]) -> list[str]:
    """Return a config class's field names, its own first, without `kind` and what all `execution` blocks share."""
    above = next((base.model_fields for base in model.__mro__[1:] if issubclass(base, Execution)), {})
    names = [name for name in model.model_fields if name not in {"kind", "execution", *above}]
    annotated = [vars(base).get("__annotations__", {}) for base in model.__mro__]
    return sorted(names, key=lambda name: next(place for place, own in enumerate(annotated) if name in own))


def block(path: str) -> type[BaseModel]:
    """Return the pydantic model of a recipe's config block; `execution` is the block that all stage kinds share."""
    first, *names = path.split(".")
    model: type[BaseModel] = Execution if first == "execution" else KINDS[first]
    for name in names:
        model = models_in(model.model_fields[name].annotation)[0]
    return model


def _fields(path: str) -> str:
    model, schema = block(path), block(path).model_json_schema()["properties"]
    rows = ["| field | is | default | meaning |", "| --- | --- | --- | --- |"]
    for name in own_fields(model):
        field = model.model_fields[name]
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_type(name, field, schema[name])} | {_default(field)} | {meaning} |")
    return "\n".join(rows)


def _type(name: str, field: Any, schema: dict[str, Any]) -> str:
    schema, *others = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    words_beside = "".join(f" \\| `{one['const']}`" for one in others if "const" in one)
    if reference := find_marker(field, Reference):
        return f"{'stages' if 'items' in schema else 'a stage'} → {' or '.join(reference.products)}"
    if find_marker(field, OutsideInput):
        return "path"
    if models_in(field.annotation):
        return f"{'list of [blocks]' if 'items' in schema else '[block]'}(#{name})"
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    bounds = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    limits = ", ".join(f"{sign} {schema[key]:g}" for key, sign in bounds.items() if key in schema)
    of = schema.get("items") or next(iter(schema.get("patternProperties", {}).values()), None)
    of = (of or schema.get("additionalProperties", {})).get("type", "value")
    words = {"array": f"list of {of}s", "object": f"name → {of}"}
    return f"{words.get(schema['type'], schema['type'])} {limits}".strip() + words_beside


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel) or value in ({}, [], ()):
        return "–"
    items = value if isinstance(value, tuple) else (value,)
    return f"`{', '.join(str(item).lower() if isinstance(item, bool) else str(item) for item in items)}`"


def _rewards(_: str) -> str:
    rows = ["| `type` | fields | gives |", "| --- | --- | --- |"]
    shared = Reward.model_fields
    for reward in REWARDS:
        schema = reward.model_json_schema()["properties"]
        own = {name: field for name, field in reward.model_fields.items() if name not in shared}
        fields = "; ".join(
            f"`{name}` ({_type(name, field, schema[name])}; default {_default(field)})".replace(
                "; default required", ", required"
            )
            for name, field in own.items()
        )
        gives = " ".join((reward.__doc__ or "").split()).replace("|", "\\|")
        rows.append(f"| `{get_args(reward.model_fields['type'].annotation)[0]}` | {fields or '–'} | {gives} |")
    return "\n".join(rows)


def _exit_codes(_: str) -> str:
    meanings = {error.exit_code: (f"`{name}`", error.__doc__) for name, error in error_classes().items()}
    meanings |= {0: ("", "Success."), 2: ("`UsageError`", "The command line is wrong.")}
    meanings[70] = ("", "An internal error; please report it.")
    rows = [f"| {code} | {name} | {(doc or '').splitlines()[0]} |" for code, (name, doc) in sorted(meanings.items())]
    return "\n".join(["| exit code | error class | meaning |", "| ---: | --- | --- |", *rows])


def _graph(recipe: str) -> str:
    stages = load_recipe(ROOT / recipe).stages.items()
    arrows = [
        f"    {above} --> {name}" for name, config in stages for above in dict.fromkeys(config.references().values())
    ]
    return "\n".join(["```mermaid", "graph LR", *arrows, "```"])


def _engines(_: str) -> str:
    rows = ["| model | H100s | `fsdp` | `megatron` |", "| --- | ---: | --- | --- |"]
    for model, num_gpus in ((model, number) for model, numbers in ENGINES_ON.items() for number in numbers):
        cells = [_best_of(model, num_gpus, engine) for engine in ("fsdp", "megatron")]
        rows.append(f"| {model} | {num_gpus} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


def _best_of(model: str, num_gpus: int, engine: str) -> str:
    options = ["--global-batch-size", "512", "--engine", engine, "--top", "1", "--json"]
    answer = CliRunner().invoke(cli, ["layouts", model, "--gpus", str(num_gpus), *options], standalone_mode=False)
    (best,) = json.loads(answer.output)["layouts"]
    degrees = ("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "micro_batch_size", "recompute", "cpu_offload")
    layout = " ".join(f"{name}={best[name]}" for name in degrees if best[name] not in (1, "none", False))
    return f"{best['tokens_per_s_per_gpu']:,.0f}: {layout}" if best["fits"] else "does not fit"


def _formats(_: str) -> str:
    """Return the documentation's table of dataset formats in Markdown."""
    rows = ["| `format` | learned from by | columns |", "| --- | --- | --- |"]
    rows += [f"| `{name}` | {LEARNERS[form.rows]} | {form.described} |" for name, form in FORMATS.items()]
    return "\n".join(rows)


WRITERS = {
    "fields": _fields,
    "rewards": _rewards,
    "exit codes": _exit_codes,
    "names": lambda _: markdown_table(),
    "graph": _graph,
    "engines": _engines,
    "formats": _formats,
    "matrix": lambda _: f"{matrix.table()}\n| {matrix.source()} | | | |",
    "nightly": lambda _: table(),
    "families": lambda shown: zoo.reasons() if shown == "reasons" else zoo.table(),
}


def stale_lines(body: str, output: str) -> list[str]:
    """Return output lines on a page that the command no longer prints, ignoring numbers and what follows `…`."""
    printed = [_shape(line) for line in output.splitlines()]
    lines = [line for line in body.splitlines() if line.strip() and not line.startswith(("```", "$ "))]
    return [line for line in lines if not any(_is_shown_by(line, shape) for shape in printed)]


def _is_shown_by(line: str, printed: str) -> bool:
    shown, ellipsis, _ = line.partition("…")
    return printed.startswith(_shape(shown)) if ellipsis else printed == _shape(line)


def _shape(line: str) -> str:
    return re.sub(r"([0-9a-f]{12}|[-+]?\d[\d.,:e+%-]*|\s|#)+", "#", line.strip())


def main() -> None:
    """Rewrite the generated blocks of documentation pages, or rerun measured commands and print which lines changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", nargs="?", const="", metavar="WORDS")
    parser.add_argument("--page", type=Path, help="Markdown page to rewrite or check (default: all pages)")
    options = parser.parse_args()
    words = options.measured
    for page in [options.page.resolve()] if options.page else PAGES:
        if words is None:
            page.write_text(rewritten(page), encoding="utf-8")
        for shown in shown_in(page) if words is not None else ():
            command = "\n".join(commands_measured(shown))
            if command and words in command:
                stale = stale_lines(shown["body"], run(command))
                print(f"{page.relative_to(ROOT)}: {command}: {len(stale)} lines are stale", *stale, sep="\n  ")


if __name__ == "__main__":
    main()
