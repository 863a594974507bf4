"""EvalScope's virtual environment is made on first use by the real uv, here from local wheels without network."""

import json
import os
import socket
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from flows.planning.checks import installation_notes
from flows.planning.plan import plan
from flows.recipe.recipe import load_recipe
from flows.store.record import Index
from stages.core.errors import ResourceError
from stages.harnesses import installation
from stages.harnesses.installation import EVALSCOPE
from stages.harnesses.registry import HARNESSES
from stages.serving.registry import ENGINES
from stages.serving.vllm.engine import VllmProgram
from tests.serving import wait_for

VERSION = "9.1"
METADATA = f"Metadata-Version: 2.1\nName: evalscope\nVersion: {VERSION}\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the path for EvalScope's environment, and let uv install from a folder of wheels only."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    information = f"evalscope-{VERSION}.dist-info"
    files = {
        "evalscope/benchmarks/_index.json": json.dumps({"gsm8k": {}}),
        f"{information}/METADATA": METADATA,
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{information}/RECORD"])
    with zipfile.ZipFile(wheels / f"evalscope-{VERSION}-py3-none-any.whl", "w") as wheel:
        for name, content in {**files, f"{information}/RECORD": record}.items():
            wheel.writestr(name, content)
    (tmp_path / "evalscope.txt").write_text(f"evalscope=={VERSION}  # via\n")
    monkeypatch.setattr(installation, "PINS", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "ours" / ".venv"))
    (tmp_path / "ours").mkdir()
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.delenv(EVALSCOPE.variable, raising=False)
    return tmp_path / "ours" / ".venv-evalscope"


def test_it_is_made_once_however_many_ask_and_has_the_version_that_was_planned(place: Path) -> None:
    harness = HARNESSES["evalscope"]
    assert harness.version() == VERSION
    assert harness.to_install() == f"EvalScope is not installed: its environment, 1.2 GB, is made first, in {place}"
    assert not place.exists(), "a plan makes nothing"
    said: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(EVALSCOPE.make, said.append) for _ in range(3)]:
            one.result()
    assert sum(f"installing EvalScope (1.2 GB): + evalscope=={VERSION}" in line for line in said) == 1
    assert EVALSCOPE.find().version == VERSION
    assert harness.to_install() is None
    assert not (place.parent / "..venv-evalscope.partial").exists()
    command = [place / "bin" / "python", "-c", "import evalscope, sys; print(sys.prefix, *evalscope.__path__)"]
    where = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert where == [str(place), str(EVALSCOPE.find().package)]


def test_what_a_killed_attempt_left_is_not_taken_for_whole(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a registry that takes the request and says nothing
        program = (
            "import sys; from pathlib import Path; from stages.harnesses import installation as one\n"
            f"sys.prefix = {sys.prefix!r}; one.PINS = Path({str(installation.PINS)!r}); one.main('evalscope')"
        )
        with monkeypatch.context() as patch:
            patch.delenv("UV_OFFLINE")
            patch.setenv("UV_FIND_LINKS", "")
            patch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
            process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
        try:
            partial = place.parent / "..venv-evalscope.partial"
            wait_for((partial / "bin" / "python").exists, what="half an environment")
        finally:
            process.kill()
            process.wait()
    assert partial.exists()
    assert not place.exists()
    EVALSCOPE.make(lambda _: None)
    assert EVALSCOPE.find().version == VERSION
    assert not partial.exists()


def test_a_failure_says_what_uv_said_and_leaves_nothing(place: Path) -> None:
    EVALSCOPE.pins.write_text(f"evalscope=={VERSION}\nno-such-package==3.1\n")
    with pytest.raises(
        ResourceError, match=r"(?s)cannot be made: uv ended with exit code 1: .*no-such-package.* `make "
    ):
        EVALSCOPE.make(lambda _: None)
    assert [path.name for path in place.parent.iterdir()] == ["..venv-evalscope.lock"]


def test_where_no_registry_answers_only_a_plan_that_would_install_is_refused_with_the_command(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    monkeypatch.setattr(type(ENGINES["vllm"]), "find_program", lambda _: VllmProgram(Path(), Path(), "0.32"))
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "ours"))
    installation.check_can_be_made.cache_clear()
    outside = {name: config.resolve_outside() for name, config in recipe.stages.items()}
    assert outside["scores"] == {"vllm_version": "0.32", "evalscope_version": VERSION}
    planned = plan(recipe, outside, Index(()))
    scored = {**planned.stages, "scores": replace(planned.stages["scores"], action="cached")}

    assert not [*installation_notes(replace(planned, stages=scored))]
    with pytest.raises(
        ResourceError, match=r"no package registry gives evalscope==9\.1: .* `make evalscope` \(1.2 GB\)"
    ):
        [*installation_notes(planned)]
    EVALSCOPE.pins.unlink()
    with pytest.raises(ResourceError, match=r"evalscope\.txt does not exist, which says what belongs into it"):
        recipe.stages["scores"].resolve_outside()


def test_one_that_is_there_is_made_again_only_for_other_pins(place: Path) -> None:
    before = os.umask(0o077)  # a stage's
    try:
        EVALSCOPE.make(lambda _: None)
    finally:
        os.umask(before)
    ours = Path(sys.executable).parent.stat().st_mode
    assert {path.stat().st_mode for path in (place, place / "bin", EVALSCOPE.find().package)} == {ours}
    (place / "first").touch()
    installation.main("evalscope")
    later_s = (place / ".ready").stat().st_mtime + 1
    os.utime(EVALSCOPE.pins, (later_s, later_s))
    EVALSCOPE.make(lambda _: None)
    assert (place / "first").exists(), "a stage takes what is there"
    installation.main("evalscope")
    assert not (place / "first").exists()


RECIPE = """
name: asked
stages:
  sft: {kind: download, model: builtin/qwen3-1m}
  scores: {kind: evaluate, model: sft, harness: evalscope, tasks: [gsm8k], serving: {}}
"""


def test_a_plan_says_what_is_made_first_and_how_large_it_is(place: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    planned = plan(recipe, {stage: {} for stage in recipe.stages}, Index(()))
    assert [*installation_notes(planned)] == [
        f"scores: EvalScope is not installed: its environment, 1.2 GB, is made first, in {place}"
    ]
    EVALSCOPE.make(lambda _: None)
    assert not [*installation_notes(planned)]
