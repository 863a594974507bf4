"""Parts of the accelerator benchmark: their order, time and classes of kernels, and which are run again."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.data.batch import IGNORED

ROOT = Path(__file__).parents[3]
PASSES_S = 2 * 12 * 60
"""Seconds of device time in which every part shall have run: two loans of a GPU."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    return importlib.import_module("gpu")


@pytest.fixture
def a_run(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide a function that runs a part named `energy` by a program, and returns its row and the run."""
    monkeypatch.delenv("OUT", raising=False)

    def started(program: str, limit_s: float = 60.0) -> tuple[dict[str, Any], Any]:
        run = gpu.Run(tmp_path, "cpu", gpu.time.monotonic() + limit_s, None)
        run._command = lambda _, result: [sys.executable, "-c", program, str(result)]
        return run.part("energy"), run

    return started


def test_the_most_wanted_come_first_and_8_bits_last(gpu: Any) -> None:
    names = [gpu.name_of(what) for what in gpu.ordered("cuda")]
    assert len(set(names)) == len(names)
    assert names[:2] == ["wide 4096 full fsdp selective", "8b 4096 LoRA fsdp"]
    first = names.index(gpu.TESTS)
    assert ["fp8" in name for name in names] == [number > first for number in range(len(names))]
    wide = {f"wide 4096 full fsdp {how}{compiled}{bits}" for how in ("none", "selective", "full")
            for compiled in ("", " compiled") for bits in ("", " fp8")}  # fmt: skip
    others = {"LoRA fsdp", "nf4 LoRA fsdp", "LoRA fsdp compiled"}
    assert wide | {f"8b 4096 {other}" for other in others} <= set(names)
    assert {"wide 4096 full fsdp selective 30 documents", "wide 4096 bf16 full fsdp selective"} <= set(names)


def test_all_fits_two_loans_by_its_guesses(gpu: Any) -> None:
    expected = [gpu.expected_s(what) for what in gpu.ordered("cuda")]
    assert sum(expected) + 2 * 2 * gpu.expected_s("preflight") <= PASSES_S
    assert max(expected) < gpu.PART_LIMIT_S


def test_the_same_programs_are_tried_on_a_cpu(gpu: Any) -> None:
    names = [[gpu.name_of(what) for what in gpu.ordered(device)] for device in ("cuda", "cpu")]
    replaced = [name.replace("wide 4096", "narrow 128").replace("8b 4096", "tiny 128") for name in names[0]]
    replaced = [name.replace("0.6b 4096", "tiny 128").replace("vl 4096", "tiny-vl 128") for name in replaced]
    assert replaced == names[1]
    assert len(set(names[1])) == len(names[1])


def test_what_failed_is_run_again_by_other_code_only(a_run: Any) -> None:
    fails, passes = "raise SystemExit('no kernel')", "print('good')"
    row, run = a_run(fails)
    assert row["status"] == "failed" and "no kernel" in row["log"] and run.is_done("energy")
    assert a_run(passes)[0]["status"] == "failed"
    file = run.out / "gpu.json"
    file.write_text(json.dumps([{**row, "code": "before"}]))
    row, run = a_run(passes)
    assert row["status"] == "passed" and run.is_done("energy")
    file.write_text(json.dumps([{**row, "code": "before"}]))
    assert a_run(fails)[0]["status"] == "passed"


def test_a_part_without_time_is_left_for_the_next_start(a_run: Any) -> None:
    row, run = a_run("print('good')", limit_s=1)
    assert row["status"] == "no time" and not run.is_done("energy") and not run.file.exists()


def test_what_was_known_when_a_part_died_is_kept(gpu: Any, a_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'status': 'measured', 'depth': 4}))"
    monkeypatch.setattr(gpu, "table", lambda rows: "")
    row, _ = a_run(f"{known}; raise SystemExit('out of luck')")
    assert (row["status"], row["depth"], row["ending"]) == ("measured", 4, "exit code 1")
    assert "out of luck" in row["log"]


@pytest.mark.parametrize(
    ("absent", "machine", "sentence"),
    [
        ("peft", {}, "has no peft: take .gpu-kit along"),
        (None, {}, "there is no nvidia-smi here"),
        (
            None,
            {"nvidia_smi": ["NVIDIA H100"]},
            "cuda was asked for, and torch [0-9.+a-z]* finds cpu: that build has no CUDA",
        ),
    ],
)
def test_the_preflight_says_in_one_sentence_why_it_stops(
    gpu: Any, absent: str | None, machine: dict[str, Any], sentence: str
) -> None:
    preflight = importlib.import_module("gpu_preflight")
    versions = {name: None if name == absent else "1" for name in preflight.NEEDED}
    assert re.search(sentence, next(preflight._problems({"versions": versions, "machine": machine}, "cuda")))


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128", "products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        (
            "void at::native::multi_tensor_apply_kernel<…, at::native::FusedAdamMathFunctor<float, 4, true>>",
            "optimizer",
        ),
        ("triton_poi_fused__to_copy_mul_silu_3", "generated"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "other"),
    ],
)
def test_kernels_are_summed_up_by_class(gpu: Any, kernel: str, expected: str) -> None:
    assert importlib.import_module("gpu_part").class_of(kernel) == expected


def test_documents_of_uneven_lengths_fill_a_row(gpu: Any) -> None:
    batch = importlib.import_module("gpu_steps").batch(100, 2, 64, documents=5)
    lengths = batch.documents.lengths
    assert len(lengths) == batch.documents.count == 10 and sum(lengths[:5]) == sum(lengths[5:]) == 64
    assert len(set(lengths)) > 2
    positions, targets = batch.inputs.position_ids.flatten(), batch.signal.targets.flatten()
    assert positions.tolist() == [place for length in lengths for place in range(length)]
    ends = [sum(lengths[: number + 1]) - 1 for number in range(10)]
    assert (targets == IGNORED).nonzero().flatten().tolist() == ends
    assert targets[: ends[0]].tolist() == batch.inputs.input_ids.flatten()[1 : ends[0] + 1].tolist()
