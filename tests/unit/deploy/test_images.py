"""Docker images are built from existing files with locked package versions, and run as an unprivileged user."""

import ast
import re
import tomllib
from fnmatch import fnmatch
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
ALL = ROOT / "deploy" / "docker" / "all.Dockerfile"
IMAGES = [file for file in FILES if file != ALL]  # it is made of the others, and has nothing of the checkout
UV = re.compile(r"uv==([\d.]+)")


def instructions(image):
    """Return a Dockerfile's instructions in order, each as its name and the list of its arguments."""
    lines = [line for line in image.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    return [(line.split()[0], line.split()[1:]) for line in joined.splitlines() if line.strip()]


def copied_from_the_checkout(image):
    return [
        source
        for name, words in instructions(image)
        if name == "COPY" and not words[0].startswith("--from")
        for source in words[:-1]
    ]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_what_is_copied_is_there_and_is_sent_to_the_builder(image):
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = copied_from_the_checkout(image)
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if not any(fnmatch(source, f"{path}*") for path in sent)] == []


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_requirements_are_copied_before_they_are_installed(image):
    used = set(re.findall(r"deploy/requirements/[\w.-]+", image.read_text()))
    copied = copied_from_the_checkout(image)
    assert used
    assert [file for file in used if not (ROOT / file).is_file()] == []
    assert [file for file in used if not any(file.startswith(source) for source in copied)] == []


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_stages_that_are_copied_from_exist(image):
    names = {words[-1] for name, words in instructions(image) if name == "FROM" and "AS" in words}
    used = {words[0].removeprefix("--from=") for name, words in instructions(image) if words[0].startswith("--from=")}
    assert used
    assert used <= names


@pytest.mark.parametrize("image", FILES, ids=lambda image: image.stem)
def test_nothing_runs_as_root(image):
    last = max(number for number, (name, _) in enumerate(instructions(image)) if name == "FROM")
    users = [words for name, words in instructions(image)[last:] if name == "USER"]
    assert users[-1] == ["1000:1000"]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_uv_is_the_one_of_the_makefile(image):
    assert UV.findall(image.read_text()) == UV.findall((ROOT / "Makefile").read_text())


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_what_an_image_starts_from_takes_a_digest(image):
    steps = instructions(image)
    first = next(number for number, (name, _) in enumerate(steps) if name == "FROM")
    assert ("ARG", ["PYTHON_DIGEST="]) in steps[:first]
    own = {words[-1] for name, words in steps if name == "FROM" and "AS" in words}
    chosen = {"${DEVICE}", "wheels-${TRANSFORMER_ENGINE}"}
    outside = {words[0] for name, words in steps if name == "FROM" and words[0] not in own | chosen}
    assert "python:3.11-slim-bookworm${PYTHON_DIGEST:+@${PYTHON_DIGEST}}" in outside
    others = outside - {"python:3.11-slim-bookworm${PYTHON_DIGEST:+@${PYTHON_DIGEST}}"}
    assert all(re.fullmatch(r"nvidia/cuda:13\.[\w.-]+\$\{CUDA_DIGEST:\+@\$\{CUDA_DIGEST\}\}", name) for name in others)
    assert not others or ("ARG", ["CUDA_DIGEST="]) in steps[:first]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_what_compiles_as_it_runs_has_a_compiler(image):
    """Images for `compile: true`, Triton or vLLM, which compile kernels at run time, contain a C++ compiler."""
    steps = instructions(image)
    last = max(number for number, (name, _) in enumerate(steps) if name == "FROM")
    installed = [words for name, words in steps[last:] if name == "RUN" and words[:2] == ["apt-get", "update"]]
    assert any({"apt-get", "install", "g++"} <= set(words) for words in installed)


def test_transformer_engine_is_compiled_where_cuda_and_the_torch_of_the_image_are():
    steps = instructions(ROOT / "deploy" / "docker" / "pipeline.Dockerfile")
    begins = [number for number, (name, _) in enumerate(steps) if name == "FROM"]
    stages = {steps[at][1][-1]: steps[at:after] for at, after in zip(begins, [*begins[1:], None], strict=True)}
    compiling = stages["wheels-yes"]
    assert "cudnn-devel" in compiling[0][1][0]
    (words,) = [words for name, words in compiling if name == "RUN"]
    assert {"torch", "--no-build-isolation", "deploy/requirements/transformer-engine.in", "g++"} <= set(words)
    assert ("ARG", ["TRANSFORMER_ENGINE=no"]) in steps[: begins[0]]
    assert "wheels-no" in stages
    pins = (ROOT / "deploy" / "requirements" / "transformer-engine.in").read_text()
    (version,) = set(re.findall(r"^transformer-engine[\w-]*==(\S+)$", pins, re.MULTILINE))
    asked = [one for one in requires("megatron-core") or [] if one.startswith("transformer-engine[")]
    assert asked and all(version in Requirement(one).specifier for one in asked)


def test_the_image_of_all_is_made_of_the_others():
    arguments = dict(word[0].split("=") for name, word in instructions(ALL) if name == "ARG")
    assert set(arguments.values()) == {f"llm-lifecycle-{image.stem}" for image in IMAGES}
    used = {words[0].strip("${}") for name, words in instructions(ALL) if name == "FROM"}
    assert used == set(arguments)


def test_the_pipeline_s_image_has_all_that_its_package_is_built_from():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = next(
        node.value
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SHIPPED"
    )
    needed = ["setup.py", *ast.literal_eval(shipped), *project["tool"]["setuptools"]["dynamic"]["dependencies"]["file"]]
    copied = copied_from_the_checkout(ROOT / "deploy" / "docker" / "pipeline.Dockerfile")
    assert [path for path in needed if not any(path.startswith(source) for source in copied)] == []
