"""The ways of new weights into a vLLM: which is used where, and that none opens a door for pickles."""

from pathlib import Path

import pytest

from stages.serving.backend import EngineAddress
from stages.serving.config import ServingConfig
from stages.serving.engine import LaunchSpec
from stages.serving.vllm.engine import VllmProgram
from stages.serving.vllm.transfers.registry import TRANSFERS, chosen


def test_device_and_placement_choose_the_way() -> None:
    ways = {
        (device, placement): chosen(device, placement)
        for device in ("cpu", "cuda", "rocm", "xpu")
        for placement in ("separate", "colocated")
    }
    by_folder = {(device, placement): None for device in ("rocm", "xpu") for placement in ("separate", "colocated")}
    assert ways == {
        **by_folder,
        **{("cpu", "separate"): "memory", ("cpu", "colocated"): "memory"},
        **{("cuda", "separate"): "nccl", ("cuda", "colocated"): "ipc"},
    }


@pytest.mark.parametrize("way", [None, *TRANSFERS])
def test_no_server_takes_pickles(way: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only servers that a training starts have an engine for weights; none unpickles, whatever our environment says."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    program = VllmProgram(tmp_path / "vllm", tmp_path / "python", "0.32.0")
    spec = LaunchSpec(
        model=tmp_path,
        served_name="policy",
        serving=ServingConfig(tool_call_parser="hermes"),
        engine_version="0.32.0",
        weight_transfer=way,
    )
    command = program.server_command(spec, EngineAddress(Path("engine.sock")))
    environment = program.server_environment(spec, "key")
    assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"
    assert ("--weight-transfer-config" in command) == (way is not None)
    extension = command[command.index("--worker-extension-cls") + 1] if "--worker-extension-cls" in command else None
    if extension:
        module, _, name = extension.partition(".")
        assert f"class {name}" in (Path(environment["PYTHONPATH"]) / f"{module}.py").read_text()
    else:
        assert "PYTHONPATH" not in environment
