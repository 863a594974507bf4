"""The llama.cpp program is found, its server's command is built, and a failed start is explained."""

import os
from pathlib import Path

import pytest

from stages.core.errors import ResourceError
from stages.serving.backend import EngineAddress
from stages.serving.config import ServingConfig
from stages.serving.engine import LaunchSpec
from stages.serving.llama_cpp import engine
from stages.serving.llama_cpp.engine import LlamaCpp, LlamaCppProgram, find_llama_cpp, free_cores

SOCKET = EngineAddress(Path("engine.sock"))
INSTALLED = LlamaCppProgram(Path("/env/bin/python"), "2026.10")
CUT_OFF = """0.00.001.941 I srv  init_listene: The UI is disabled
0.00.567.051 E llama_model_load: error loading model: tensor 'blk.0.ffn_down.weight' data is not within the file bounds
0.00.567.079 E llama_model_load_from_file_impl: failed to load model
Traceback (most recent call last):
  File "server_program.py", line 36, in main
RuntimeError: Failed to init server, please check the input params.
"""
NOT_INSTALLED = """Traceback (most recent call last):
ModuleNotFoundError: No module named 'xllamacpp'
"""


def make_environment(root: Path, version: str | None) -> Path:
    """Make a fake virtual environment with the files that the lookup of llama.cpp reads; returns its `python`."""
    metadata = root / "lib" / "python3.11" / "site-packages" / f"xllamacpp-{version}.dist-info"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").touch(mode=0o755)
    if version:
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: xllamacpp\nVersion: {version}\n")
    return root / "bin" / "python"


def spec(model: Path, **serving: object) -> LaunchSpec:
    config = ServingConfig.model_validate({"engine": "llama_cpp", **serving})
    return LaunchSpec(model=model, served_name="m", serving=config, engine="llama_cpp", engine_version="2026.10")


def options(command: list[str]) -> dict[str, str]:
    return dict(zip(command[4::2], command[5::2], strict=True))


def test_the_installed_wheel_is_told_by_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFECYCLE_LLAMA_CPP", str(make_environment(tmp_path, "2026.10.1")))

    assert find_llama_cpp() == LlamaCppProgram(tmp_path / "bin" / "python", "2026.10.1")


def test_an_environment_without_the_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFECYCLE_LLAMA_CPP", str(make_environment(tmp_path, None)))

    with pytest.raises(ResourceError, match=r"has no package xllamacpp beside it; .* `make llama-cpp`"):
        find_llama_cpp()


def test_without_it_the_way_to_get_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIFECYCLE_LLAMA_CPP", raising=False)
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))

    with pytest.raises(ResourceError, match=r"\.venv-llama-cpp/bin/python does not exist; .* `make llama-cpp`"):
        find_llama_cpp()


def test_everything_the_recipe_says_reaches_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "free_cores", lambda: 3)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')

    command = INSTALLED.server_command(spec(tmp_path, max_model_len=512, max_num_seqs=7), SOCKET)
    by_default = options(INSTALLED.server_command(spec(tmp_path), SOCKET))

    assert command[:2] == ["/env/bin/python", "-P"] and command[3] == str(tmp_path / "model.gguf")
    expected = {"--alias": "m", "--socket": "engine.sock", "--context": "512", "--slots": "7", "--threads": "3"}
    assert options(command) == expected
    assert (by_default["--context"], by_default["--slots"]) == ("2048", "4")


def test_the_key_travels_in_the_environment_only(tmp_path: Path) -> None:
    environment = INSTALLED.server_environment(spec(tmp_path, max_model_len=8), "sk-secret")

    assert environment["LLAMA_API_KEY"] == "sk-secret"
    assert "sk-secret" not in " ".join(INSTALLED.server_command(spec(tmp_path, max_model_len=8), SOCKET))


@pytest.mark.parametrize(("load", "limit", "threads"), [(0.2, "", 8), (5.6, "", 2), (30.0, "", 1), (0.0, "3", 3)])
def test_threads_are_as_many_as_cores_are_free(monkeypatch: pytest.MonkeyPatch, load, limit, threads) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setenv("OMP_NUM_THREADS", limit)

    assert free_cores() == threads


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (CUT_OFF, "llama_model_load: error loading model: tensor 'blk.0.ffn_down.weight' data is not within the file"),
        (NOT_INSTALLED, "ModuleNotFoundError: No module named 'xllamacpp'"),
    ],
)
def test_the_first_error_is_the_cause(log: str, cause: str) -> None:
    assert (LlamaCpp().root_cause(log) or "").startswith(cause)


def test_a_log_without_errors_has_no_cause() -> None:
    assert LlamaCpp().root_cause(CUT_OFF.splitlines()[0]) is None
