"""Script that adds predicted memory and speed to a table of published training runs, and reports bad cells."""

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stages.core.errors import DataError
from stages.models.known_models import KNOWN, known_model
from stages.planner.memory import memory
from stages.planner.search import memory_fit
from tests.benchmarks.planner_runs import all_runs
from tests.benchmarks.predict_table import PREDICTED, predict_table, predicted_memory_gib, predicted_step_time_s
from tests.benchmarks.published_runs import VTRAIN_COLUMNS, read_table

COLUMNS = (
    "model,params_b,layers,hidden,heads,kv_heads,ffn,vocab,seq,gbs,mbs,tp,pp,dp,shard,recompute,gpus,gpu,precision"
)
LLAMA = "Llama-3.1-8B,8,32,4096,32,8,14336,128256,8192,16,2,1,1,8,FSDP2,selective,8,H100,bf16"


def table(tmp_path, *rows, header=COLUMNS):
    file = tmp_path / "in.csv"
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


def predicted(tmp_path, file):
    summary = predict_table(file, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as opened:
        return summary, list(csv.DictReader(opened))


def test_the_script_writes_the_table_or_names_the_bad_cell(tmp_path):
    def run(gbs):
        header = "model,layers,hidden,heads,seq,gbs,mbs,tp,pp,dp,gpus,gpu"
        file = table(tmp_path, f"Llama-3-8B,,,,8192,{gbs},1,1,1,8,8,H100", header=header)
        script = Path(__file__).parents[3] / "tests/benchmarks/predict_table.py"
        command = [sys.executable, str(script), str(file), "--out", str(tmp_path / "out.csv")]
        return subprocess.run(command, capture_output=True, text=True)

    done, refused = run("16"), run("lots")
    assert done.returncode == 0 and "1 of 1 rows" in done.stdout and "assumed" in done.stdout
    with (tmp_path / "out.csv").open() as opened:
        assert float(next(csv.DictReader(opened))["pred_step_time_s"]) > 0
    assert refused.returncode and "line 2, column gbs: 'lots'" in refused.stderr


def test_predictions_stand_beside_what_the_table_said(tmp_path):
    summary, (row,) = predicted(tmp_path, table(tmp_path, LLAMA))
    assert (summary.num_rows, summary.num_predicted) == (1, 1)
    assert row["model"] == "Llama-3.1-8B" and set(PREDICTED) <= set(row)
    tokens = 16 * 8192 / float(row["pred_step_time_s"]) / 8
    assert float(row["pred_tok_s_gpu"]) == pytest.approx(tokens, rel=1e-3)
    assert float(row["pred_memory_gb"]) > 0
    assert row["pred_oom"] in ("0", "1")


def test_a_run_that_cannot_fit_is_said_to_run_out_of_memory(tmp_path):
    row = "Llama-3.1-405B,,,,,,,,8192,8,1,1,1,8,FSDP2,none,8,H100,bf16"
    assert predicted(tmp_path, table(tmp_path, row))[1][0]["pred_oom"] == "1"


def test_empty_cells_are_filled_and_said_to_be(tmp_path):
    row = "GPT-1B,1.16,24,1920,15,,,,,8,,1,1,,,,8,A100,"
    assumed = predicted(tmp_path, table(tmp_path, row))[1][0]["pred_assumed"]
    for column in ("vocab=", "seq=", "mbs=", "dp=8", "gpu=a100-80gb", "recompute="):
        assert column in assumed


def test_sizes_that_are_not_given_are_those_of_the_model_of_that_name(tmp_path):
    row = "LLAMA3.1_405B,,,,,,,,8192,64,1,4,8,2,,,128,DGX-B200,FP8"
    run = read_table(table(tmp_path, row))[1][0]
    assert run.shape == KNOWN["llama3 405b"]
    assert (run.layout.world_size, run.workload.precision, run.hardware.name) == (64, "fp8", "b200")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("LLAMA3_8B", "llama3 8b"),
        ("Qwen3_235B_a22B", "qwen3 235b"),
        ("GPT OSS 120B", "gpt oss 120b"),
        ("DeepSeekV3 (w/ MTP)", "deepseekv3"),
        ("meta-llama/Llama-2-70b-hf", "llama2 70b"),
        ("Mixtral-8x7B", "mixtral 8x7b"),
    ],
)
def test_names_of_models_are_understood_as_they_are_written(name, known):
    assert known_model(name) == KNOWN[known]


def test_a_model_that_nothing_tells_is_left_out_with_the_reason(tmp_path):
    summary, rows = predicted(tmp_path, table(tmp_path, "Mystery,,,,,,,,2048,8,1,1,1,8,,,8,A100-80GB,bf16", LLAMA))
    assert summary.num_predicted == 1
    assert rows[0]["pred_step_time_s"] == "" and "not predicted" in rows[0]["pred_assumed"]


def test_the_format_of_vtrain_is_read(tmp_path):
    header = ",".join([*VTRAIN_COLUMNS, "iteration time (ms)"])
    _, (row,) = predicted(tmp_path, table(tmp_path, "8,16,2,2048,16,24,1024,2,2,2,310.98", header=header))
    assert row["iteration time (ms)"] == "310.98" and float(row["pred_step_time_s"]) > 0
    run = read_table(table(tmp_path, "8,16,2,2048,16,24,1024,1,4,2,1", header=header))[1][0]
    assert (run.layout.tp, run.layout.data_parallel_size, run.layout.pp) == (1, 4, 2)


def test_missing_columns_are_named(tmp_path):
    with pytest.raises(DataError, match="gbs, gpu"):
        read_table(table(tmp_path, header=COLUMNS.replace("gbs,", "").replace("gpu,", "")))


@pytest.mark.parametrize("bad", ["many", "0", "-4", "2.5"])
def test_text_in_a_number_is_named_by_row_and_column(tmp_path, bad):
    row = LLAMA.replace(",16,2,", f",16,{bad},")
    with pytest.raises(DataError, match="line 3, column mbs"):
        read_table(table(tmp_path, LLAMA, row))


def test_an_unknown_device_is_named_by_row_and_costs_no_other_row(tmp_path):
    summary, rows = predicted(tmp_path, table(tmp_path, LLAMA, LLAMA.replace("H100", "TPUv5")))
    assert summary.num_predicted == 1
    (line, reason), *_ = summary.unknown
    assert line == 3 and "gpu 'TPUv5' is none of" in reason
    assert rows[1]["pred_oom"] == ""


@pytest.mark.parametrize(
    ("gpu", "name", "memory_gib"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb", 79.1),
        ("H100-96GB", "h100-80gb", 95.0),
        ("A100-SXM4-40GB", "a100-40gb", 39.4),
        ("NVIDIA A800-SXM4-80GB", "a800-80gb", 79.2),
        ("AMD Instinct MI300X", "mi300x", 191.5),
        ("8x L40S", "l40s", 44.4),
        ("8x RTX 4090", "rtx-4090", 23.6),
    ],
)
def test_devices_are_understood_as_they_are_written(tmp_path, gpu, name, memory_gib):
    hardware = read_table(table(tmp_path, LLAMA.replace("H100", gpu)))[1][0].hardware
    assert hardware.name == name
    assert hardware.memory_gib == pytest.approx(memory_gib, rel=0.01)


@pytest.mark.parametrize(
    ("shard", "degrees"),
    [("", (1, 16)), ("DDP", (16, 1)), ("DDP+distopt", (1, 16)), ("FSDP2", (1, 16)), ("HSDP", (2, 8))],
)
def test_who_shares_what_follows_from_the_words_for_it(tmp_path, shard, degrees):
    row = LLAMA.replace(",8,FSDP2,", f",16,{shard},").replace("selective,8,", "selective,16,")
    layout = read_table(table(tmp_path, row))[1][0].layout
    assert (layout.dp_replicate, layout.dp_shard) == degrees


def test_lora_is_cheaper_in_time_and_memory(tmp_path):
    header = COLUMNS + ",kind"
    whole, adapters = predicted(tmp_path, table(tmp_path, LLAMA + ",sft", LLAMA + ",LoRA r=8", header=header))[1]
    for column in ("pred_step_time_s", "pred_memory_gb"):
        assert float(adapters[column]) < float(whole[column])


def test_fully_sharded_training_gains_from_pipelines_and_tensor_parallelism(tmp_path):
    """Predicted memory and speed of Llama 405B on 512 H100s are near those of torchtitan's published runs.

    These used 72.7 to 82.5 GiB, and trained 100 to 128 tokens/s a GPU.
    """
    row = "Llama-3.1-405B,,,,,,,,8192,256,4,8,8,8,FSDP2,full,512,H100-96GB,fp8"
    (run,) = predicted(tmp_path, table(tmp_path, row))[1]
    assert 65 < float(run["pred_memory_gb"]) < 95
    assert 80 < float(run["pred_tok_s_gpu"]) < 160


@pytest.mark.parametrize(
    ("gpus", "gpu", "precision", "note", "measured_gib"),
    [
        (8, "H100-96GB", "bf16", "compile=no", 82.4),
        (8, "H100-96GB", "bf16", "compile=yes", 77.0),
        (8, "H100-96GB", "fp8", "compile=yes", 76.8),
        (128, "H100-96GB", "bf16", "compile=no", 67.0),
        (128, "H100-96GB", "bf16", "compile=yes", 62.0),
        (32, "H200", "fp8", "compile=yes; fused cross-entropy=yes", 47.96),
    ],
)
def test_compiling_layers_and_loss_saves_what_was_measured(tmp_path, gpus, gpu, precision, note, measured_gib):
    """Predicted memory of 8B training runs that torchtitan published is within 3.5% of the measured memory.

    A compiled layer does not keep its last matrix product's result; a compiled loss keeps no fp32 logits.
    """
    row = f"Llama-3.1-8B,,,,,,,,8192,{2 * gpus},2,1,1,{gpus},FSDP2,selective,{gpus},{gpu},{precision},{note}"
    (run,) = read_table(table(tmp_path, row, header=COLUMNS + ",note"))[1]
    of_tensors = replace(run.hardware.efficiency, runtime_gib=0, communicator_gib=0)
    found = memory(run.shape, run.engine, run.layout, run.workload, software=run.software, efficiency=of_tensors)
    assert found.peak_gib == pytest.approx(measured_gib, rel=0.035)


def test_a_board_that_is_run_with_less_power_or_slower_memory_is_slower(tmp_path):
    boards = ("H100", "H100, 700 W", "H100, 500 W", "H100, 2.4 TB/s")
    rows = [LLAMA.replace("H100", f'"{board}"') for board in boards]
    usual, rated, throttled, slower = (run.hardware for run in read_table(table(tmp_path, *rows))[1])
    assert rated == usual
    assert throttled.sustained == pytest.approx(usual.sustained * (5 / 7) ** 0.58)
    assert (throttled.memory_gb_per_s, slower.memory_gb_per_s) == (usual.memory_gb_per_s, 2400)


def test_a_table_that_is_not_there_is_an_error_of_the_user(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        read_table(tmp_path / "nowhere.csv")


SOFTWARE = LLAMA.replace("FSDP2,selective", "DDP+distopt,none").replace(",2,1,1,8,", ",2,2,1,4,")


@pytest.mark.parametrize(
    ("header", "cells"),
    [
        (",sp,overlap,kernel,cuda_graphs,fp8_attention,fp8_activations,recompute_layers", ",no,yes,unfused,1,1,on,8"),
        (",kernel,note", ",core,median of 6 runs; SP=False; tp overlap=1; cudagraph=1; fp8 attention=1; "
         "activation input in fp8=True; recompute layers=8"),
    ],
)  # fmt: skip
def test_what_a_row_says_of_its_software_counts(tmp_path, header, cells):
    (run,) = read_table(table(tmp_path, SOFTWARE + cells, header=COLUMNS + header))[1]
    (usual,) = read_table(table(tmp_path, SOFTWARE))[1]
    assert usual.layout.sequence_parallel and not run.layout.sequence_parallel
    assert run.software == replace(
        usual.software, overlaps_layers=True, flash_attention=False, cuda_graphs=True, fp8_attention=True,
        fp8_activation_inputs=True, recomputed_share=8 / 32,
    )  # fmt: skip
    assert run.layout.recompute == "full" and usual.layout.recompute == "none"


def test_software_that_is_neither_yes_nor_no_is_named(tmp_path):
    with pytest.raises(DataError, match="line 2, column overlap: 'partly' is none of 1, true, yes"):
        read_table(table(tmp_path, SOFTWARE + ",partly", header=COLUMNS + ",overlap"))


def test_a_known_model_s_name_does_not_override_the_sizes_that_a_row_states(tmp_path):
    row = "Llama3-405B-kv16 cut to 4 layers,,4,16384,128,16,53248,128256,4096,8,1,1,1,8,DDP,none,8,B200,bf16"
    mixture = "DeepSeekV3 cut to 4 layers,,4,7168,,,,,4096,8,1,1,1,8,DDP,none,8,B200,bf16"
    cut, cut_mixture = (run.shape for run in read_table(table(tmp_path, row, mixture))[1])
    assert cut == replace(KNOWN["llama3 405b"], num_layers=4, num_kv_heads=16)
    assert (cut_mixture.num_experts, cut_mixture.num_mixture_layers) == (257, 3)  # as large a share dense, at least one


@pytest.mark.parametrize(
    ("share", "fit"), [(0.89, "fits"), (0.91, "tight"), (1.1, "tight"), (1.12, "does not fit")]
)  # fmt: skip
def test_what_is_near_the_memory_there_is_is_tight(share, fit):
    """A run whose predicted memory is close to the device's is marked as tight, since predictions are up to 10% off."""
    assert memory_fit(share * 80, 80) == fit


def test_llama_70b_by_lora_on_one_device_takes_what_it_took(tmp_path):
    """Llama 2 70B LoRA (MLPerf Training 5.0) fits one B200 only with activation inputs kept in fp8, as predicted."""
    row = "Llama2-70B,70,80,8192,64,8,28672,32000,8192,8,1,1,1,8,DDP+distopt,none,8,B200-SXM-180GB,fp8,lora 16"
    with_note = f"{row},SP=0; cudagraph=0; fp8 attention=1; activation input in fp8=1"
    file = table(tmp_path, row + ",", with_note, header=COLUMNS + ",kind,note")
    without, found = (float(one["pred_memory_gb"]) for one in predicted(tmp_path, file)[1])
    assert 0.9 * 178 < found < 178.4 < without


@pytest.mark.parametrize(("gpu", "layers"), [("GB300", 20), ("GB200", 40)])
def test_what_cannot_be_on_a_device_is_in_the_memory_of_a_near_host(tmp_path, gpu, layers):
    """On a GB200 or GB300, as many layers' activations are predicted to be offloaded as in NVIDIA's recipe."""
    row = f"LLAMA3_70B,,,,,,,,8192,256,2,1,1,64,Megatron-FSDP64,,64,{gpu},FP8"
    (run,) = read_table(table(tmp_path, row))[1]
    assert run.layout.recompute == "none"
    assert run.software.offloaded_share * 80 == pytest.approx(layers, rel=0.2)


def test_where_the_host_is_far_as_few_layers_are_recomputed_as_it_takes(tmp_path):
    row = LLAMA.replace(",16,2,1,1,8,FSDP2,selective,8,H100", ",16,{rows},1,1,8,DDP+distopt,,8,{gpu}")
    cases = [(1, "H200"), (2, "H100"), (64, "H100")]
    runs = [read_table(table(tmp_path, row.format(rows=rows, gpu=gpu)))[1][0] for rows, gpu in cases]
    assert [run.layout.recompute for run in runs] == ["none", "full", "full"]
    assert 0 < runs[1].software.recomputed_share < 1 == runs[2].software.recomputed_share
    assert predicted_memory_gib(runs[1]) <= runs[1].hardware.memory_gib < predicted_memory_gib(runs[2])


SIMUMAX = "DeepSeek-V{version} cut to 4 layers,,4,{hidden},128,128,{ffn},{vocab},4096,{rows},1,1,{pp},{dp}"


@pytest.mark.parametrize(
    ("version", "pp", "measured_s", "measured_gib"),
    [(2, 1, 2.721, 45.63), (2, 2, 1.728, 44.7), (3, 1, 4.141, 104.3), (3, 2, 2.719, 114.0)],
)
def test_mixtures_with_latent_attention_take_what_was_measured(tmp_path, version, pp, measured_s, measured_gib):
    """Predicted step time and memory of DeepSeek models cut to 4 layers agree with SimuMax's on 8 B200s.

    32 micro-batches; memory of tensors, in GiB; pipeline stages differ by a dense layer. Nothing was fitted to them.
    """
    sizes = {2: {"hidden": 5120, "ffn": 12288, "vocab": 102400}, 3: {"hidden": 7168, "ffn": 18432, "vocab": 129280}}
    dp = 8 // pp
    row = SIMUMAX.format(version=version, pp=pp, dp=dp, rows=32 * dp, **sizes[version])
    header = COLUMNS + ",ep,overlap,overlap_gradients,fused_cross_entropy"
    row += f",DDP+distopt,none,8,B200,bf16,{dp},no,no,yes"
    (run,) = read_table(table(tmp_path, row, header=header))[1]
    stages = memory(run.shape, run.engine, run.layout, run.workload, software=run.software).stages
    assert max(stage.total - stage.runtime for stage in stages) == pytest.approx(measured_gib, rel=0.04)
    assert predicted_step_time_s(run) == pytest.approx(measured_s, rel=0.08)


@pytest.mark.parametrize(("gpu", "measured_s"), [("GB200", 43.268), ("GB300", 34.517)])
def test_training_in_four_bits_takes_what_was_measured(tmp_path, gpu, measured_s):
    """Predicted step times of Llama 3.1 405B in NVFP4 on 256 devices are within 8% of Megatron-Bridge 26.04's.

    No constant of the planner was fitted to these runs.
    """
    pp, dp, vpp = (16, 4, 8) if gpu == "GB200" else (8, 8, 4)
    row = f"LLAMA3.1_405B,,,,,,,,8192,1536,1,4,{pp},{dp},DDP+distopt,,256,DGX-{gpu},NVFP4,{vpp}"
    (run,) = read_table(table(tmp_path, row, header=COLUMNS + ",vpp"))[1]
    assert predicted_step_time_s(run) == pytest.approx(measured_s, rel=0.08)


@pytest.mark.parametrize(("version", "is_recorded"), [("26.04.01", False), ("26.06", True), ("26.08", True)])
def test_mixtures_are_launched_from_a_recording_since_a_version(tmp_path, version, is_recorded):
    row = f"Qwen3_30B_a3B,,,,,,,,4096,512,4,1,1,8,DDP+distopt,,8,GB200,MXFP8,8,Megatron-Bridge {version} GB200"
    (run,) = read_table(table(tmp_path, row, header=COLUMNS + ",ep,source"))[1]
    assert (run.software.cuda_graphs, run.software.overlaps_experts) == (is_recorded, is_recorded)


def test_published_runs_that_ran_are_rarely_said_not_to_fit():
    """At most a tenth of the runs that ran is said not to fit, and at most one of those that ran out is said to fit."""
    verdicts: dict[bool, list[str]] = {False: [], True: []}
    for run in all_runs():
        if run.has_software:
            fit = memory_fit(predicted_memory_gib(run.run), run.run.hardware.memory_gib)
            verdicts[run.out_of_memory].append(fit)
    ran, ran_out = verdicts[False], verdicts[True]
    assert len(ran) > 250 and ran.count("does not fit") <= len(ran) / 10
    assert len(ran_out) == 7 and ran_out.count("fits") <= 1
