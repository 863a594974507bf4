"""Pinned Python packages have a hash for every file, except device-dependent ones, and uv refuses other files."""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from flows.cli import install_commands
from stages.core.errors import ResourceError
from stages.core.shipped import shipped
from tests.http_server import serving

ROOT = Path(__file__).parents[3]
LOCKS = sorted((ROOT / "deploy" / "requirements").glob("*.txt"))
PINNED = [lock for lock in LOCKS if "overrides" not in lock.name]
BLOCK = re.compile(
    r"^(?P<name>[\w.-]+)(?:\[[\w,-]+\])?==(?P<version>\S+)(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})*)$",
    re.MULTILINE,
)
BUILT_FOR_A_DEVICE = set(
    re.search(r"^BUILT_FOR_A_DEVICE := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split("|")
)


@pytest.mark.parametrize("lock", PINNED, ids=lambda lock: lock.stem)
def test_every_pin_has_hashes_but_those_that_differ_with_the_device(lock: Path) -> None:
    text = lock.read_text()
    pins = {match["name"]: match for match in BLOCK.finditer(text)}
    assert len(pins) == len(re.findall(r"^\S+==", text, re.MULTILINE))
    without = {name for name, match in pins.items() if not match["hashes"]}
    built = BUILT_FOR_A_DEVICE if lock.stem != "gpu-kit" else set()  # pip takes that one's from PyPI
    assert without == built & pins.keys()
    assert [match["version"] for match in pins.values() if "+" in match["version"]] == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_no_lock_names_a_registry(lock: Path) -> None:
    assert re.findall(r"^-|://|^ *--(?!hash)\S+", lock.read_text(), re.MULTILINE) == []


def test_a_wheel_carries_recipes_and_pins_and_asks_for_uv(tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if not name.startswith("tests/") and (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    program = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    with zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))) as wheel:
        names = {*wheel.namelist()}
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        assert {"Requires-Dist: uv", "Requires-Dist: click"} <= {*wheel.read(metadata).decode().splitlines()}
    folders = ("configs/*.yaml", "configs/*/*.jsonl", "configs/templates/*", "deploy/requirements/*", "deploy/*/*.pth")
    wanted = {f"stages/shipped/{path.relative_to(ROOT)}" for folder in folders for path in ROOT.glob(folder)}
    assert wanted - names == set()
    assert shipped("configs/quickstart.yaml") == ROOT / "configs" / "quickstart.yaml"


def test_an_installation_asks_the_index_that_the_environment_names(tmp_path: Path, monkeypatch) -> None:
    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    asked: list[str] = []
    (tmp_path / "llama-cpp.txt").write_text("tiny-thing==1.0\n")
    monkeypatch.setattr(install_commands, "shipped", lambda _: tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "own"))
    for variable in ("UV_FIND_LINKS", "PIP_FIND_LINKS", "UV_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    with serving(Index) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{url}/private/simple")
        monkeypatch.setenv("UV_NO_CACHE", "1")
        with pytest.raises(ResourceError, match="uv ended with exit code 1; its reason is above"):
            install_commands.INSTALLERS["llama-cpp"]()
    assert set(asked) == {"/private/simple/tiny-thing/"}
    assert (tmp_path / ".venv-llama-cpp" / "bin" / "python").exists()


def test_the_kit_has_the_pins_of_the_environments() -> None:
    kit, pipeline, tests = (
        {match["name"]: match["version"] for match in BLOCK.finditer((LOCKS[0].parent / name).read_text())}
        for name in ("gpu-kit.txt", "pipeline.txt", "test.txt")
    )
    named = [line for line in (LOCKS[0].parent / "gpu-kit.in").read_text().splitlines() if not line.startswith("#")]
    assert kit.keys() == set(named)
    of_gpus = {"fla-core", "flash-linear-attention"}  # kernels in Triton, which no environment of CPUs has
    assert kit.keys() - (pipeline | tests).keys() == of_gpus
    assert {name: pin for name, pin in kit.items() if name not in of_gpus}.items() <= (pipeline | tests).items()


@pytest.mark.parametrize("option", ["--constraints", "--requirement"])
def test_a_file_with_another_hash_is_not_installed(option: str, tmp_path: Path) -> None:
    """A wheel whose hash is not the pinned one is not installed, by either option by which the Makefile gives them."""
    wheel = tmp_path / "wheels" / "tiny_thing-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_thing.py", "")
        archive.writestr("tiny_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        archive.writestr("tiny_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr("tiny_thing-1.0.dist-info/RECORD", "")
    (tmp_path / "pins.in").write_text("tiny-thing\n")

    def install(digest: str) -> subprocess.CompletedProcess:
        (tmp_path / "pins.txt").write_text(f"tiny-thing==1.0 \\\n    --hash=sha256:{digest}\n")
        command = [Path(sys.executable).with_name("uv"), "pip", "install", "--no-index", "--no-cache"]
        place = ["--find-links", wheel.parent, "--target", tmp_path / "site", "--python", sys.executable]
        pins = [option, tmp_path / "pins.txt", "--requirement", tmp_path / "pins.in"]
        return subprocess.run([*command, *place, *pins], capture_output=True, text=True, check=False)

    refused = install("0" * 64)
    assert refused.returncode != 0 and "Hash mismatch" in refused.stderr
    assert not (tmp_path / "site" / "tiny_thing.py").exists()
    assert install(hashlib.sha256(wheel.read_bytes()).hexdigest()).returncode == 0
    assert (tmp_path / "site" / "tiny_thing.py").exists()
