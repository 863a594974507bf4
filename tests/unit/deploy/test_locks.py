"""Pinned Python packages have a hash for every file, except device-dependent ones, and uv refuses other files."""

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
