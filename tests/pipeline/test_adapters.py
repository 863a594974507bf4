"""Stages that train, continue and merge an adapter write the right files, or fail with a clear error."""

import json
import math
import re
import shutil
import signal
import time

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from stages.adapters.files import read_adapter
from stages.core.contract import FINDING_TAG, StageContext, StageResult
from stages.core.errors import GateError, ModelError
from stages.kinds.download.config import DownloadConfig
from stages.kinds.download.run import run as download
from stages.kinds.merge.config import MergeConfig
from stages.kinds.merge.run import run as merge
from tests.findings import raise_findings
from tests.train_stage import finish_again, logged, make_artifacts, make_config, make_context, run_to_end, start

ADAPTER = {"rank": 8, "alpha": 16}
NUM_DPO_STEPS = 12


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Provide artifacts for adapter tests: a base model, datasets, and `sft`, a slightly trained model."""
    artifacts = make_artifacts(tmp_path_factory.mktemp("artifacts"))
    work = tmp_path_factory.mktemp("sft") / "sft-0123456789ab"
    config = make_config(steps=30, warmup_steps=5)
    make_context(work, artifacts, config)
    run_to_end(work, config)
    return {**artifacts, "sft": work}


@pytest.fixture(scope="module")
def half(artifacts, tmp_path_factory):
    """Provide the artifact of the SFT model in bf16."""
    folder = shutil.copytree(artifacts["sft"], tmp_path_factory.mktemp("half") / artifacts["sft"].name)
    weights = folder / "model" / "model.safetensors"
    save_file({name: one.bfloat16() for name, one in load_file(weights).items()}, weights, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def dpo(artifacts, tmp_path_factory):
    """Provide the work folder of a DPO stage that trained an adapter of the SFT model on two processes."""
    work = tmp_path_factory.mktemp("dpo") / "dpo-0123456789ab"
    config = dpo_config()
    make_context(work, artifacts, config)
    run_to_end(work, config)
    return work


def dpo_config(**fields):
    layout, execution = {"dp_shard": 2, "micro_batch_size": 2}, {"checkpoint_every_steps": 4}
    fields = {"layout": layout, "execution": execution, **fields}
    return make_config("dpo", model="sft", adapter=ADAPTER, steps=NUM_DPO_STEPS, **fields)


def merged(inputs, work, **fields):
    """Run the merge stage on the DPO adapter and its base model `sft`, and return the stage's result."""
    work.mkdir(parents=True)
    config = MergeConfig.model_validate({"kind": "merge", "model": "sft", "adapter": "dpo", **fields})
    context = StageContext(work, "merged", "0" * 12, inputs, {}, work)
    result = merge(config, context)
    raise_findings(context)
    return result


@pytest.fixture(scope="module")
def tuned(artifacts, tmp_path_factory):
    """Provide the work folder of an SFT stage that trained an adapter of `sft`, from which other stages continue."""
    work = tmp_path_factory.mktemp("tuned") / "tuned-0123456789ab"
    run_stage(work, artifacts, make_config(model="sft", adapter=ADAPTER, steps=12))
    return work


def run_stage(work, artifacts, config):
    make_context(work, artifacts, config)
    run_to_end(work, config)


def test_dpo_goes_on_with_an_adapter_that_was_taken_in_and_whose_start_is_its_reference(tuned, artifacts, tmp_path):
    mine = tmp_path / "mine-0123456789ab"
    mine.mkdir()
    taken = DownloadConfig(kind="download", adapter=f"file://{tuned / 'adapter'}", base="sft")
    download(taken, StageContext(mine, "mine", "0" * 12, artifacts, {}, tmp_path, taken.resolve_outside()))
    inputs, work = {**artifacts, "mine": mine}, tmp_path / "dpo-0123456789ab"
    fields = {"model": "mine", "base": "sft", "steps": 4, "learning_rate": 1e-4}
    run_stage(
        work, inputs, make_config("dpo", adapter=ADAPTER, layout={"dp_shard": 2, "micro_batch_size": 2}, **fields)
    )
    assert logged(work)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    before, after = (load_file(one / "adapter" / "adapter_model.safetensors") for one in (tuned, work))
    distance = max((after[name] - before[name]).abs().max().item() for name in before)
    assert before.keys() == after.keys()
    assert 0 < distance < 5 * 1e-4  # a few small steps from there, and not a new one

    result = merged({**inputs, "dpo": work}, tmp_path / "merged", max_difference=1e-5)
    assert result.metrics["max_abs_logprob_difference"] < 1e-5


def test_one_that_is_stacked_learns_what_it_would_beside_the_merged_model(tuned, artifacts, tmp_path):
    inputs, small = {**artifacts, "tuned": tuned}, {"rank": 4, "alpha": 4, "target_modules": ["q_proj", "up_proj"]}
    merged({**artifacts, "dpo": tuned}, tmp_path / "merged")
    stacked, beside = tmp_path / "dpo-0123456789ab", tmp_path / "beside-0123456789ab"
    fields = {"steps": 4, "layout": {"micro_batch_size": 4}}
    run_stage(
        stacked, inputs, make_config("dpo", model="tuned", base="sft", adapter={**small, "stack": "merge"}, **fields)
    )
    run_stage(
        beside, {**artifacts, "base": tmp_path / "merged"}, make_config("dpo", model="base", adapter=small, **fields)
    )
    assert [row["loss"] for row in logged(stacked)] == pytest.approx([row["loss"] for row in logged(beside)], abs=1e-6)

    written = load_file(stacked / "adapter" / "adapter_model.safetensors")
    assert {min(one.shape) for one in written.values()} == {8 + 4}
    result = merged({**inputs, "dpo": stacked}, tmp_path / "both", max_difference=1e-5)
    assert result.metrics["max_abs_logprob_difference"] < 1e-5


def test_one_that_starts_from_its_inputs_has_ranks_of_its_own_on_all_processes_and_after_merging(artifacts, tmp_path):
    adapter, work = {**ADAPTER, "init": "eva"}, tmp_path / "dpo-0123456789ab"
    config = make_config(model="sft", adapter=adapter, steps=6, layout={"dp_shard": 2, "micro_batch_size": 2})
    run_stage(work, artifacts, config)
    written = read_adapter(work / "adapter")
    ranks = {len(a) for a, _ in written.factors.values()}
    assert len(ranks) > 1
    assert max(ranks) <= 16
    assert "a layer has at most" in (work / "events.jsonl").read_text()
    result = merged({**artifacts, "dpo": work}, tmp_path / "merged", max_difference=1e-5)
    assert result.metrics["max_abs_logprob_difference"] < 1e-5

    again = tmp_path / "again-0123456789ab"
    config = make_config(model="tuned", base="sft", adapter=ADAPTER, steps=2)
    run_stage(again, {**artifacts, "tuned": work}, config)
    assert {name: len(a) for name, (a, _) in read_adapter(again / "adapter").factors.items()} == {
        name: len(a) for name, (a, _) in written.factors.items()
    }


def test_an_adapter_of_another_base_is_not_gone_on_with(tuned, artifacts, tmp_path):
    other = shutil.copytree(artifacts["sft"], tmp_path / "sft-00000other00")
    config = make_config(model="tuned", base="sft", adapter=ADAPTER)
    make_context(tmp_path / "work", {**artifacts, "sft": other, "tuned": tuned}, config)
    with pytest.raises((RuntimeError, AssertionError)):
        run_to_end(tmp_path / "work", config)
    message = (tmp_path / "work" / "error.json").read_text()
    assert "it is an adapter of sft-0123456789ab, not of sft-00000other00" in message


def test_dpo_begins_at_its_base_and_learns(dpo):
    rows = logged(dpo)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]["loss"] < 0.95 * math.log(2)


def test_the_artifact_is_the_adapter_alone(dpo, artifacts):
    assert not (dpo / "model").exists()
    weights = load_file(dpo / "adapter" / "adapter_model.safetensors")
    base = load_file(artifacts["sft"] / "model" / "model.safetensors")
    assert sum(one.numel() for one in weights.values()) < 0.2 * sum(one.numel() for one in base.values())
    assert json.loads((dpo / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        artifacts["sft"].name
    )


def test_checkpoints_hold_the_adapter_and_nothing_of_its_base(dpo):
    (checkpoint,) = (dpo / "scratch" / "checkpoints").glob("step-12")
    tensors = [name for name in FileSystemReader(checkpoint).read_metadata().state_dict_metadata if "layers" in name]
    assert len(tensors) == 4 * len(load_file(dpo / "adapter" / "adapter_model.safetensors"))  # two moments, a step
    assert all(".lora_" in name for name in tensors)


def test_merged_it_gives_what_training_gave_and_what_peft_gives(dpo, artifacts, tmp_path):
    inputs = {**artifacts, "dpo": dpo}
    result = merged(inputs, tmp_path / "merged", max_difference=1e-5)
    assert result.metrics["max_abs_logprob_difference"] < 1e-5
    assert result.metrics["kl_from_training_nats_per_token"] < 1e-6
    assert result.metrics["same_greedy_fraction"] == 1
    assert result.metrics["changed_fraction"] > 0.9

    base = AutoModelForCausalLM.from_pretrained(artifacts["sft"] / "model", dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(base, dpo / "adapter").merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "model", dtype=torch.float32).state_dict()
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-6


@pytest.mark.nightly
def test_megatron_trains_the_same_adapter(dpo, artifacts, tmp_path):
    """`make test` holds Megatron's adapters to PEFT's under each layout (`tests/parity/test_megatron_layouts.py`)."""
    work, layout = tmp_path / "dpo-0123456789ab", {"tp": 2, "sequence_parallel": True, "micro_batch_size": 2}
    config = dpo_config(engine="megatron", layout=layout)
    make_context(work, artifacts, config)
    run_to_end(work, config)
    assert [row["loss"] for row in logged(work)] == pytest.approx([row["loss"] for row in logged(dpo)], abs=1e-4)
    assert (load_file(work / "adapter" / "adapter_model.safetensors").keys()) == (
        load_file(dpo / "adapter" / "adapter_model.safetensors").keys()
    )
    result = merged({**artifacts, "dpo": work}, tmp_path / "merged", max_difference=1e-5)
    assert result.metrics["max_abs_logprob_difference"] < 1e-5
    assert result.metrics["same_greedy_fraction"] == 1


@pytest.mark.nightly
def test_a_killed_training_goes_on_to_the_same_adapter(dpo, artifacts, tmp_path):
    """Killed adapter training resumes to bitwise the same adapter.

    `make test`: the next test, which begins with a checkpoint, and kills of full training in `test_train_faults.py`.
    """
    work, config = tmp_path / "dpo-0123456789ab", dpo_config()
    make_context(work, artifacts, config)
    process = start(work, config)
    end = time.monotonic() + 200
    while not (work / "scratch" / "checkpoints" / "step-4").exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    run_to_end(work, config)

    expected, found = (load_file(one / "adapter" / "adapter_model.safetensors") for one in (dpo, work))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_it_goes_on_with_another_number_of_processes_to_the_same_adapter(dpo, artifacts, tmp_path):
    """A checkpoint of adapter training resumes on another number of processes and gives the same adapter.

    The run of two processes is resumed on two (bitwise equal) and on one, and the latter on two.
    """
    same, alone, pair = (tmp_path / name / dpo.name for name in ("same", "alone", "pair"))
    every_2 = {"execution": {"checkpoint_every_steps": 2}}
    finish_again(dpo, 8, same, artifacts, dpo_config())
    finish_again(dpo, 8, alone, artifacts, dpo_config(layout={"micro_batch_size": 4}, **every_2))
    finish_again(alone, 10, pair, artifacts, dpo_config(**every_2))
    expected = load_file(dpo / "adapter" / "adapter_model.safetensors")
    bits = load_file(same / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(bits[name], weight) for name, weight in expected.items())
    for work in (alone, pair):
        assert [row["loss"] for row in logged(work)] == pytest.approx([row["loss"] for row in logged(dpo)], abs=1e-6)
        found = load_file(work / "adapter" / "adapter_model.safetensors")
        assert max((found[name] - weight).abs().max().item() for name, weight in expected.items()) < 1e-6


@pytest.mark.parametrize(("precision", "apart"), [("nf4", 0.1), ("int8", 0.01)])
def test_an_adapter_of_a_base_in_few_bits_is_merged_into_the_base_as_it_was(precision, apart, artifacts, tmp_path):
    """An adapter of a quantized base is merged into the exact base: predictions differ by the rounding alone."""
    work = tmp_path / "dpo-0123456789ab"
    adapter = {**ADAPTER, "base_precision": precision}
    run_stage(work, artifacts, make_config("dpo", model="sft", adapter=adapter, steps=6, learning_rate=2e-3))
    inputs = {**artifacts, "dpo": work}
    result = merged(inputs, tmp_path / "merged", max_difference=apart)
    assert 1e-5 < result.metrics["mean_abs_logprob_difference"] < apart
    assert result.metrics["kl_nats_per_token"] < 1e-6, "beside the exact base it is the same adapter"
    with pytest.raises(GateError, match="other log-probabilities than training did"):
        merged(inputs, tmp_path / "strict", max_difference=1e-5)


def test_a_layer_that_no_gradient_reaches_is_named(artifacts, tmp_path):
    """Training warns of an adapted layer that gets no gradient, here v_proj, because o_proj's weights are nearly 0."""
    base = shutil.copytree(artifacts["sft"], tmp_path / artifacts["sft"].name)
    weights = load_file(base / "model" / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"].fill_(1e-45)
    save_file(weights, base / "model" / "model.safetensors", metadata={"format": "pt"})
    work, config = (
        tmp_path / "tuned",
        make_config(model="sft", adapter={**ADAPTER, "target_modules": ["v_proj"]}, steps=3),
    )
    make_context(work, {**artifacts, "sft": base}, config)
    run_to_end(work, config)
    events = (work / "events.jsonl").read_text()
    assert re.search(r"1 of \d adapted layers have learned nothing, their B is 0 \(model.layers.1.self_attn", events)
    assert FINDING_TAG not in json.loads((work / "result.json").read_text())["tags"], "the other layer has learned"


def test_a_stage_that_is_killed_between_the_files_of_its_adapter_writes_it_again(tuned, artifacts, tmp_path):
    work, config = tmp_path / "tuned-0123456789ab", make_config(model="sft", adapter=ADAPTER, steps=12)
    make_context(work, artifacts, config)
    with pytest.raises(RuntimeError, match=f"killed_between_files: {-signal.SIGKILL}: "):
        run_to_end(work, config, "tests.killed_between_files")
    assert (work / "adapter" / "adapter_model.safetensors").exists()
    assert not (work / "adapter" / "adapter_config.json").exists()
    assert not (work / "result.json").exists()
    with pytest.raises(ModelError, match=r"reading the adapter in .*adapter_config.json"):
        read_adapter(work / "adapter")

    run_to_end(work, config)
    expected, found = (load_file(one / "adapter" / "adapter_model.safetensors") for one in (tuned, work))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert read_adapter(work / "adapter").base == artifacts["sft"].name


def test_files_that_do_not_belong_together_are_refused(dpo, artifacts, tmp_path):
    other = shutil.copytree(artifacts["sft"], tmp_path / "sft-00000other00")
    with pytest.raises(ModelError, match="into sft-00000other00: it was trained on sft-0123456789ab"):
        merged({"sft": other, "dpo": dpo}, tmp_path / "1")

    damaged = shutil.copytree(dpo, tmp_path / "damaged")
    weights = damaged / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"reading the adapter in .*train it again"):
        merged({**artifacts, "dpo": damaged}, tmp_path / "2")

    changed = shutil.copytree(dpo, tmp_path / "changed")
    weights = changed / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if ".lora_B." in name)
    save_file({**tensors, name.replace("lora_B", "lora_C"): tensors[name].clone()}, weights)
    with pytest.raises(ModelError, match=r"lora_C.*unexpected or without a partner"):
        merged({**artifacts, "dpo": changed}, tmp_path / "3")

    save_file({**tensors, name: 2 * tensors[name]}, weights)
    with pytest.raises(GateError, match="other log-probabilities than training did"):
        merged({**artifacts, "dpo": changed}, tmp_path / "4", max_difference=1e-5)


def test_an_adapter_whose_change_the_rounding_takes_away_is_refused(dpo, artifacts, half, tmp_path):
    small = shutil.copytree(dpo, tmp_path / "small")
    factors = small / "adapter" / "adapter_model.safetensors"
    save_file({name: 1e-12 * one if "lora_B" in name else one for name, one in load_file(factors).items()}, factors)

    with pytest.raises(ModelError, match="are as they were after rounding"):
        merged({**artifacts, "sft": half, "dpo": small}, tmp_path / "merged")


def test_a_refresh_of_another_learning_rate_stores_a_fraction_of_its_base(dpo, artifacts):
    """Adapter training stores a fraction of its base: here a seventh, of a large model a thousandth."""
    base = sum(file.stat().st_size for file in (artifacts["sft"] / "model").rglob("*.safetensors"))
    adapter = (dpo / "adapter" / "adapter_model.safetensors").stat().st_size
    kept = sum(file.stat().st_size for file in dpo.rglob("*") if file.is_file() and "scratch" not in file.parts)
    (checkpoint,) = (dpo / "scratch" / "checkpoints").glob("step-12")
    saved = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    tokenizer = sum(file.stat().st_size for file in (dpo / "adapter").iterdir() if file.suffix != ".safetensors")
    assert adapter < base / 5
    assert kept - tokenizer < adapter + 2**20, "the rest is records, logs and a plot"
    assert saved < 3 * adapter + 2**20, "weights that learn and two moments, nothing of the base"


def test_an_adapter_of_which_rounding_leaves_nothing_is_kept_and_refused(artifacts, half, tmp_path):
    """A trained adapter whose merge changes no bf16 weight is stored but rejected, although its LoRA B is not 0."""
    work, config = tmp_path / "dpo-0123456789ab", dpo_config(learning_rate=1e-12, layout={"micro_batch_size": 2})
    make_context(work, {**artifacts, "sft": half}, config)
    run_to_end(work, config)
    result = StageResult.model_validate_json((work / "result.json").read_text())
    assert result.tags[FINDING_TAG].startswith("ModelError: the adapter does nothing: once it is merged into sft-0123")
    assert read_adapter(work / "adapter").base == half.name
    assert result.metrics["mean_abs_change_nats_per_token"] < 1e-6


def test_an_adapter_that_changes_little_is_an_adapter(artifacts, half, tmp_path):
    """An adapter that changes log-probabilities by less than the 0.8% that bf16 resolves is still accepted."""
    work = tmp_path / "dpo-0123456789ab"
    config = dpo_config(learning_rate=2e-5, layout={"micro_batch_size": 2}, precision="bf16")
    make_context(work, {**artifacts, "sft": half}, config)
    run_to_end(work, config)
    result = StageResult.model_validate_json((work / "result.json").read_text())
    assert FINDING_TAG not in result.tags
    assert 0 < result.metrics["mean_abs_change_nats_per_token"] < 2**-7
    assert 0 < result.metrics["changed_token_fraction"] <= 1


def test_what_the_stage_says_is_logged(dpo):
    result = StageResult.model_validate_json((dpo / "result.json").read_text())
    assert result.metrics["evaluation_loss"] < math.log(2)
