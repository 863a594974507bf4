"""Pinned Python packages have a hash for every file, except device-dependent ones, and uv refuses other files."""

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from click.testing import CliRunner

from flows.cli import install_commands
from flows.cli.main import cli
from stages.core import shipped as shipped_files
from stages.core.errors import ResourceError
from stages.core.shipped import MAKE_TARGETS, install_command, shipped
from stages.serving.vllm.engine import find_vllm
from tests.http_server import serving
from tests.inspecting_proxy import inspecting_proxy

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


def test_a_release_is_of_the_tag_the_project_s_version_and_the_newest_in_the_changelog(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "CHANGELOG.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (uv := tmp_path / ".venv" / "bin" / "uv").parent.mkdir(parents=True)
    uv.write_text('#!/bin/sh\necho "uv $@"\n')
    uv.chmod(0o755)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@example.com", *words], cwd=tmp_path, check=True)

    def released() -> tuple[int, str]:
        done = subprocess.run(["make", "release"], cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    git("init", "--quiet")
    git("add", *(path.name for path in tmp_path.iterdir() if path.is_file()))
    git("commit", "--quiet", "--message=x")
    git("tag", "v9.9")
    code, said = released()
    assert code and f"is built of a clean checkout of v{version}; found v9.9" in said
    git("tag", "--delete", "v9.9")
    git("tag", f"v{version}")
    code, said = released()
    assert not code and "uv build --wheel" in said
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 9.9\n")
    code, said = released()
    assert code and f"pyproject.toml has version {version}, which is not the first of CHANGELOG.md" in said


@pytest.mark.parametrize("trusted", [True, False])
def test_an_installation_comes_by_a_proxy_from_a_private_index_with_a_private_authority(
    trusted: bool, tmp_path: Path, monkeypatch
) -> None:
    wheel = tiny_wheel(tmp_path / "index" / "private" / "simple" / "tiny-thing")
    index = partial(SimpleHTTPRequestHandler, directory=tmp_path / "index")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "llama-cpp.txt").write_text(f"tiny-thing==1.0 --hash=sha256:{digest}\n")
    monkeypatch.setattr(install_commands, "shipped", lambda _: tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "own"))
    for variable in ("UV_FIND_LINKS", "PIP_FIND_LINKS", "UV_INDEX_URL", "SSL_CERT_DIR", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    with serving(index) as url, inspecting_proxy(tmp_path, {"index.example": int(url.rpartition(":")[2])}) as proxy:
        for name, value in {
            "UV_DEFAULT_INDEX": "https://index.example/private/simple",
            "UV_NO_CACHE": "1",
            "UV_HTTP_RETRIES": "0",
            "HTTPS_PROXY": proxy.url,
            "SSL_CERT_FILE": str(proxy.authority),
        }.items():
            monkeypatch.setenv(name, value)
        if not trusted:
            monkeypatch.delenv("SSL_CERT_FILE")
            with pytest.raises(ResourceError, match=r"uv ended with exit code [12]; its reason is above"):
                install_commands.INSTALLERS["llama-cpp"]()
        else:
            install_commands.INSTALLERS["llama-cpp"]()
    assert set(proxy.asked) == {"index.example"}
    installed = list((tmp_path / ".venv-llama-cpp").glob("lib/*/site-packages/tiny_thing.py"))
    assert len(installed) == trusted


def test_every_part_is_installed_by_make_in_a_checkout_and_without_one_by_lifecycle_install(tmp_path, monkeypatch):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert install_commands.INSTALLERS.keys() == MAKE_TARGETS.keys()
    assert {*MAKE_TARGETS.values()} <= targets
    for part, target in MAKE_TARGETS.items():
        assert install_command(part) == f"make {target}"
    monkeypatch.setenv("LIFECYCLE_VLLM", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "own"))
    monkeypatch.setattr(shipped_files, "IN_WHEEL", tmp_path)
    with pytest.raises(ResourceError, match="create the serve environment with `lifecycle install serve`, or set"):
        find_vllm()
    refused = CliRunner().invoke(cli, ["install", "nothing"]).output
    assert [part for part in MAKE_TARGETS if f"'{part}'" not in refused] == []


def test_messages_leave_it_to_one_place_whether_make_installs_a_part() -> None:
    """Only `skypilot.py`, whose task gets the whole checkout, calls make by itself."""
    spelled = re.compile(rf"\bmake ({'|'.join(MAKE_TARGETS.values())})\b|lifecycle install [a-z]+-?[a-z]+`")
    files = (path for room in ("flows", "stages") for path in (ROOT / room).rglob("*.py") if path.name != "skypilot.py")
    assert [path for path in files if spelled.search(path.read_text())] == []


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
    wheel = tiny_wheel(tmp_path / "wheels")
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


def tiny_wheel(folder: Path) -> Path:
    wheel = folder / "tiny_thing-1.0-py3-none-any.whl"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_thing.py", "")
        archive.writestr("tiny_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        archive.writestr("tiny_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr("tiny_thing-1.0.dist-info/RECORD", "")
    return wheel
