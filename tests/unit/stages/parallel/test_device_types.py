"""Device types (CPU, CUDA, …) are defined in one table; errors name the features that a type lacks."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from stages.core.errors import ResourceError
from stages.models.shape import ModelShape
from stages.parallel import accelerator
from stages.parallel.compiler import missing_compiler
from stages.parallel.device_types import DEVICE_TYPES, DeviceType, check_capability, check_device, device_type
from stages.parallel.engines.registry import RULES
from stages.parallel.layout import Layout
from stages.planner.costs import SearchRequest
from stages.planner.hardware import hardware_at_hand
from stages.planner.search import estimate
from stages.planner.workload import Workload

ROOT = Path(__file__).parents[4]
NAMES = {  # kind → what its driver, or this project, calls such a device
    "cuda": "NVIDIA H200",
    "rocm": "AMD Instinct MI300X",
    "npu": "Ascend910B2",
    "xpu": "Intel(R) Data Center GPU Max 1550",
    "mps": "Apple M3 Max",
    "cpu": None,
}
SHAPE = ModelShape(
    num_layers=8, hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, ffn_size=1536, vocab_size=8000
)
ELSEWHERE = (
    "stages/engines/megatron/",  # Megatron-core's own names
    "stages/parallel/engines/megatron.py",  # the same
    "stages/serving/vllm/",  # what vLLM builds kernels for
    "stages/serving/packaged.py",  # options of SGLang's server, which are called so
    "stages/planner/",  # recorded launches, which are called so
    "flows/launch/cluster.py",  # variables of every vendor, so that none is passed on
    "flows/cli/install_commands.py",  # a folder of deploy/ that is called so
    "flows/planning/devices.py",  # asks the table for the GPUs that the driver lists
)
"""Files that may name a device type, such as `cuda`, since they use another program's interface."""

each = pytest.mark.parametrize("kind", DEVICE_TYPES, ids=lambda kind: kind.name)


@each
def test_the_planner_compiles_for_the_kinds_that_can(kind):
    assert hardware_at_hand(NAMES[kind.name], 1, None).compiles == ("compile" not in kind.lacks)


ASK_TORCH = """
import os, sys, torch
from stages.parallel import accelerator
for name, has_plugin in zip(sys.argv[1::2], sys.argv[2::2]):
    if os.fork():
        os.wait()
        continue
    if has_plugin:  # torch has a place for it that the plugin fills
        torch.utils.rename_privateuse1_backend(name)
    assert accelerator.of_device(torch.device(name)).torch_type == name
    print(name, flush=True)
    os._exit(0)
"""
ASK_ALLOCATOR = """
import os, sys, torch
for settings in sys.argv[1:]:
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    torch._C._accelerator_setAllocatorSettings(settings)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def known_to_torch() -> list[str]:
    """Provide the names of those of our device types (CPU, CUDA, …) that the installed torch knows."""
    # Each in a process of its own: a renamed place stays renamed, and torch looks for its module from then on.
    asked = [word for kind in DEVICE_TYPES for word in (kind.torch_type, "plugin" if kind.plugin else "")]
    done = subprocess.run([sys.executable, "-c", ASK_TORCH, *asked], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return done.stdout.split()


@each
def test_torch_can_be_asked_for_each(kind: DeviceType, known_to_torch: list[str]) -> None:
    assert kind.torch_type in known_to_torch
    assert kind.backends == "gloo" or kind.backends.startswith("cpu:gloo,")


@pytest.mark.parametrize("settings", [kind.allocator for kind in DEVICE_TYPES if kind.allocator])
def test_torch_takes_the_settings_of_its_allocator(settings: str) -> None:
    """torch accepts our settings of its memory allocator, and refuses invalid ones.

    Each is tried in a process of its own, a fork; torch reads the settings also where it has no device.
    """
    asked = [sys.executable, "-c", ASK_ALLOCATOR, settings, settings.replace("True", "perhaps")]
    done = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert done.stdout.split() == ["0", "1"]


def test_tensor_parallelism_on_gpus_wants_one_queue_of_kernels() -> None:
    rules = RULES["megatron"]
    assert rules.environment("cuda", Layout(tp=2)) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert not rules.environment("cuda", Layout())
    assert not rules.environment("cpu", Layout(tp=2))
    assert not RULES["fsdp"].environment("cuda", Layout(dp_shard=2))


@each
def test_each_can_be_planned_for(kind: DeviceType) -> None:
    hardware = hardware_at_hand(NAMES[kind.name], 1, None)
    assert hardware is not None, "has no description"
    found = estimate(SearchRequest(SHAPE, Workload(1024, 8), hardware, 1), "fsdp", Layout())
    assert found.time.step_time_s > 0
    assert 0 < found.memory.peak_gib < hardware.memory_gib


@each
def test_each_trains_by_fsdp_in_bf16(kind: DeviceType) -> None:
    check_device(kind, "fsdp", Layout(), "bf16")


@pytest.mark.parametrize(
    ("name", "engine", "layout", "precision", "lacking"),
    [
        ("mps", "megatron", {}, "fp8", "megatron.*fp8"),
        ("mps", "fsdp", {"dp_shard": 2}, "bf16", "several processes: .*start one process"),
        ("mps", "fsdp", {"cpu_offload": True}, "bf16", "cpu_offload"),
        ("mps", "fsdp", {"recompute": "offload"}, "bf16", "recompute: offload: .*share"),
        ("xpu", "megatron", {}, "bf16", "megatron: .*engine: fsdp"),
        ("npu", "megatron", {}, "bf16", "megatron"),
        ("npu", "fsdp", {"compile": True}, "bf16", "compile: false"),
        ("rocm", "megatron", {}, "fp8", "fp8: .*bf16"),
        ("cpu", "megatron", {}, "fp8", "fp8"),
        ("cpu", "fsdp", {}, "fp8", "fp8: .*NVIDIA.*bf16"),
    ],
)
def test_what_a_device_lacks_is_refused_by_name(name, engine, layout, precision, lacking) -> None:
    kind = device_type(name)
    with pytest.raises(ResourceError, match=lacking) as refusal:
        check_device(kind, engine, Layout(**layout), precision)
    assert kind.title in str(refusal.value)


def test_a_device_that_is_too_old_for_8_bits_is_refused_by_name() -> None:
    gpu = device_type("cuda")
    for capability, precision in (((8, 9), "fp8"), ((9, 0), "fp8"), ((10, 0), "fp8"), ((8, 0), "bf16")):
        check_capability(gpu, capability, precision)
    with pytest.raises(ResourceError, match=r"compute capability 8\.0, .* needs 8\.9 or later .* `precision: bf16`"):
        check_capability(gpu, (8, 0), "fp8")


def test_a_device_without_a_row_is_refused_by_name() -> None:
    with pytest.raises(ResourceError, match="type meta, which is unsupported; supported: cuda, rocm, npu"):
        accelerator.of_device(torch.device("meta"))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines where torch sees no accelerator")
@pytest.mark.parametrize("listed", ["proc/driver/nvidia/gpus/0000:01:00.0", "dev/nvidia0"])
def test_devices_that_torch_does_not_see_are_not_silently_replaced_by_the_cpu(
    listed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "ROOT", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert accelerator.type_at_hand().name == "cpu"
    (tmp_path / listed).mkdir(parents=True)
    (tmp_path / "dev").mkdir(exist_ok=True)
    (tmp_path / "dev" / "nvidiactl").touch()  # which is no device
    with pytest.raises(ResourceError, match=r"the driver lists 1 NVIDIA GPUs, but torch .* to train on the CPU"):
        accelerator.type_at_hand()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert accelerator.type_at_hand().name == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert accelerator.unseen_devices()


def test_no_other_file_names_a_kind_of_accelerator() -> None:
    done = subprocess.run(
        ["git", "grep", "-lE", r"\bcuda\b|CUDA_|torch_npu|\bxpu\b|nccl:", "--", "stages/*.py", "flows/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = [file for file in done.stdout.split() if not file.startswith(ELSEWHERE)]
    assert found == ["stages/parallel/device_types.py"]
    assert not re.search(r"^import torch|^from torch", (ROOT / found[0]).read_text(), re.MULTILINE)


def test_this_machine_has_a_compiler():
    assert missing_compiler(on_gpu=False) is None and missing_compiler(on_gpu=True) is None


@pytest.mark.parametrize(("on_gpu", "names"), [(True, "gcc or clang"), (False, "g++ or clang++")])
def test_a_machine_without_a_compiler_is_named_with_a_remedy(on_gpu, names, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert f"needs {names} on this machine, and there is none; install it" in (missing_compiler(on_gpu) or "")


def test_a_variable_that_names_no_program_is_named(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "CC is 'no-such-compiler', which is no program" in (missing_compiler(on_gpu=True) or "")


def test_headers_of_python_are_needed(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "has no Python.h" in (missing_compiler(on_gpu=False) or "")
