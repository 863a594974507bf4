"""Documentation is correct: commands parse, names exist, recipes are valid, tables and outputs are current."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from datetime import date
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from flows.cli.main import cli
from flows.recipe.recipe import load_stages
from stages.kinds.registry import KINDS
from stages.parallel.engines.megatron import FAMILIES
from stages.planner.hardware import HARDWARE
from tests.pages import (
    MEASURED,
    PAGES,
    ROOT,
    block,
    blocks,
    commands_measured,
    commands_of,
    num_own_words,
    rewritten,
    shown_in,
    stale_lines,
)

FENCE = re.compile(r"^ *```(?P<language>\S*).*?\n(?P<body>[\s\S]*?)^ *```$", re.MULTILINE)
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
READMES = [page for page in PAGES if page.name == "README.md"]


@cache
def text_of(*patterns):
    """Return the contents of all files that match one of the glob patterns, as one text."""
    return "\n".join(path.read_text(encoding="utf-8") for pattern in patterns for path in ROOT.glob(pattern))


def fences(page, *languages):
    return [match["body"] for match in FENCE.finditer(page.read_text()) if match["language"] in languages]


def prose(page):
    return FENCE.sub("", page.read_text())


def spans(page):
    """Return the texts between backquotes in a documentation page, except in code blocks."""
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", prose(page))]


def command_named(words):
    """Return the click command that the first words of a command line name, and the remaining words."""
    command = cli
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def trouble_with(line):
    """Return the error of parsing a documented command line, or None; the command itself is not run."""
    words = shlex.split(line.split("|")[0].split(" > ")[0], comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    match words:
        case ["lifecycle", *rest]:
            command, rest = command_named(rest)
            try:
                command.make_context("lifecycle", rest)
            except click.UsageError as error:
                return error.format_message()
            except click.exceptions.Exit:  # --help, --version
                return None
        case ["make", *targets]:
            return next((target for target in targets if "=" not in target and target not in TARGETS), None)
        case ["python", script, *_]:
            return None if (ROOT / script).is_file() else script
    return None


def slug(heading):
    """Return the link anchor that GitHub gives a heading of a Markdown page."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@every_page
def test_what_a_program_writes_is_as_it_would_write_it_today(page):
    assert page.read_text(encoding="utf-8") == rewritten(page), "run `make docs`"


@every_page
def test_commands_are_understood(page):
    lines = [line for shown in shown_in(page) for line in commands_measured(shown)]
    lines += [line for body in fences(page, "console") for line in commands_of(body)]
    assert [(line, trouble) for line in lines if (trouble := trouble_with(line.replace("\\\n", " ")))] == []


@every_page
def test_commands_within_sentences_exist_with_their_options(page):
    for span in spans(page):
        if span.startswith("lifecycle "):
            command, rest = command_named(span.split()[1:])
            known = {option for parameter in command.params for option in parameter.opts}
            assert command is not cli or rest[0].startswith("--help"), span
            assert set(re.findall(r"--[a-z-]+", " ".join(rest))) <= known | {"--help"}, span
        elif span.startswith("make ") or span.startswith("python tests/"):
            assert trouble_with(span.split(" [")[0]) is None, span


@every_page
def test_output_says_where_it_comes_from(page):
    shown = shown_in(page)
    bare = [body for body in fences(page, "console") if not any(body in one["body"] for one in shown)]
    assert [line for body in bare for line in body.splitlines() if line and not line.startswith(("$ ", "    "))] == []
    measured = [one for one in shown if one["kind"] == "measured"]
    assert all(commands_measured(one) for one in measured)
    assert all(date.fromisoformat(MEASURED.fullmatch(one["argument"])[1]) <= date.today() for one in measured)


@every_page
def test_numbers_in_a_text_block_are_held_by_a_test(page):
    tests = text_of("tests/**/test_*.py")
    lines = [line for body in fences(page, "text") for line in body.splitlines() if re.search(r"\d\.\d", line)]
    assert [line for line in lines if line.startswith("|") and line not in tests] == []


@every_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in map(slug, re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)), target


@every_page
def test_files_and_variables_that_are_named_exist(page):
    code = text_of("Makefile", "flows/**/*.py", "stages/**/*.py", "deploy/**/*.yaml", "tests/**/*.py")
    for span in spans(page):
        if re.match(r"(flows|stages|configs|tests|deploy)/[\w./*-]*$", span):
            assert list(ROOT.glob(span.rstrip("/"))), span
        if re.fullmatch(r"[A-Z]{2,}(_[A-Z]+)+", span):
            assert span in code, span


@every_page
def test_recipes_are_valid(page):
    """Recipes on documentation pages are valid; a fragment is read as part of the quickstart."""
    quickstart = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())["stages"]
    for body in fences(page, "yaml"):
        tree = yaml.safe_load(body)
        stages = tree.get("stages", {**quickstart, **tree})
        assert load_stages("page", ROOT / "configs", stages).stages


@pytest.mark.parametrize("page", sorted((ROOT / "configs").rglob("*.md")), ids=lambda page: page.stem)
def test_a_page_of_the_reference_fits_one_sitting(page):
    assert num_own_words(page) <= 1500


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.parent.relative_to(ROOT)))
def test_the_page_of_a_folder_is_short(page):
    assert len(page.read_text().split()) <= 3000


def test_every_page_is_listed_on_the_first_page_or_on_the_page_of_its_folder():
    def linked(page):
        targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", prose(page))
        return {(page.parent / target).resolve() for target in targets}

    indexes = {index.parent: linked(index) for index in READMES}
    for page in PAGES:
        above = [folder for folder in page.parents if folder in indexes and folder / "README.md" != page]
        assert any(page in indexes[folder] for folder in above) or page.parent == ROOT, page


@every_page
def test_functions_and_classes_that_a_map_names_are_in_their_files(page):
    for path, name in re.findall(r"`((?:flows|stages)/[\w/]+\.py)`: `(\w+)`", prose(page)):
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if hasattr(node, "name")}, (path, name)


def test_the_diff_that_adds_a_method_applies_and_its_loss_is_the_one_of_the_paper(tmp_path):
    """The documented diff that adds a training method applies, and the method's loss equals the paper's formula.

    With equally likely answers, the loss is -log σ(-target), whatever β is.
    """
    (diff,) = fences(ROOT / "stages/extending.md", "diff")
    for folder in ("flows", "stages"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    subprocess.run(["git", "apply", "-C1", "-"], input=diff, text=True, check=True, cwd=tmp_path)
    training = {
        "kind": "train",
        "method": "margin",
        "model": "base",
        "data": {"dataset": "pairs"},
        "margin": {"target": 2},
    }
    program = f"""
import math, types, torch
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.registry import METHODS
config = TrainConfig.model_validate({ {**training, "global_batch_size": 8, "learning_rate": 1e-4}!r})
loss = METHODS["margin"].build_loss(config.margin)
pairs = lambda one: one.reshape(2, 3).sum(1)
documents = types.SimpleNamespace(count=2, sums=pairs)
signal = types.SimpleNamespace(documents=documents, has_target=torch.ones(6))
value, metrics = loss(torch.full((6,), -0.5), signal, {{"pairs": 1}})
assert math.isclose(value.item(), math.log1p(math.exp(2)), rel_tol=1e-6), value
assert loss.counts(signal) == {{"pairs": 1}} and metrics["answer_margin"] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_every_block_of_a_recipe_has_its_table_in_the_reference():
    pages = (ROOT / "configs").glob("*.md")
    shown = {block(one["argument"]) for page in pages for one in shown_in(page) if one["kind"] == "fields"}
    assert {block(path) for kind in ("execution", *KINDS) for path in blocks(kind)} == shown


def test_the_first_page_is_short_and_names_every_command():
    page = ROOT / "README.md"
    assert len(page.read_text().splitlines()) <= 200
    named = {span.split()[1] for span in spans(page) if span.startswith("lifecycle ")}
    assert set(cli.commands) <= named


def test_the_command_is_on_the_path_of_its_environment():
    activate = Path(sys.executable).with_name("activate")
    subprocess.run(["bash", "-c", f". {activate} && lifecycle --version"], check=True, capture_output=True)


def test_a_line_is_stale_if_it_is_printed_no_more_whatever_its_numbers():
    body = "```console\n$ make demo\nsft  built   166.3 s  loss 0.001163\n… and more\nbuilt in 3 s\n```"
    assert stale_lines(body, "sft built 7.2 s  loss 2e-5\nbuilt after 3 s") == ["built in 3 s"]


@every_page
def test_examples_in_python_are_sound(page):
    names = {}
    for body in fences(page, "python"):
        exec(compile(body, page.name, "exec"), names)


def test_the_hardware_and_families_that_there_are_are_named():
    assert set(HARDWARE) <= set(spans(ROOT / "stages/planner/README.md"))
    assert set(FAMILIES) <= set(spans(ROOT / "stages/engines/README.md"))
