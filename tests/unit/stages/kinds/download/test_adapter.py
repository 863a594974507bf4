"""PEFT adapters trained elsewhere are imported together with sample predictions, or refused with the reason."""

import json
import math
import shutil

import peft
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.adapters import files
from stages.adapters.config import AdapterConfig
from stages.adapters.lora import add_adapter, load_trained_adapter, read_start
from stages.core.contract import StageContext
from stages.core.errors import DownloadError, LifecycleError, ModelError
from stages.kinds.download.adapter import TEXTS
from stages.kinds.download.config import DownloadConfig
from stages.kinds.download.run import run
from stages.kinds.merge.config import MergeConfig
from stages.kinds.merge.run import run as merge
from stages.models.recorded import read_record
from stages.serving.served_models import adapter_folders
from tests.mergeable import BASE, make_adapter, make_base

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    artifact = tmp_path_factory.mktemp("artifacts") / BASE
    make_base(artifact, **SIZES)
    return artifact


@pytest.fixture(scope="module")
def original(base, tmp_path_factory):
    """Provide an adapter folder as PEFT writes it, whose config names another base model than ours."""
    return written(make_adapter(base, 0, "all-linear"), tmp_path_factory.mktemp("elsewhere") / "tuned")


def written(adapted, folder):
    adapted.save_pretrained(folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "somebody/tiny"}))
    return folder


def take_in(folder, base, work):
    """Run the download stage on an adapter folder, and return the folder of its artifact."""
    work.mkdir()
    config = DownloadConfig(kind="download", adapter=f"file://{folder}", base="base")
    outside = config.resolve_outside()
    run(config, StageContext(work, "mine", "0" * 12, {"base": base}, {}, work, outside))
    return work


def test_it_is_an_adapter_of_its_base_with_what_peft_gives_on_record(base, original, tmp_path):
    mine = take_in(original, base, tmp_path / "mine-0123456789ab")
    described = json.loads((mine / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == BASE
    weights = (one / "adapter_model.safetensors" for one in (original, mine / "adapter"))
    assert len({file.read_bytes() for file in weights}) == 1
    assert (mine / "adapter" / "tokenizer.json").is_file()
    check_record(mine, base, original)


def check_record(mine, base, original):
    """Check that predictions recorded with an imported adapter equal those of PEFT with the original adapter."""
    plain = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    oracle = peft.PeftModel.from_pretrained(plain, original).eval()
    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    for text, document in zip(TEXTS, read_record(mine), strict=True):
        tokens = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            predicted = oracle(input_ids=tokens).logits[0, :-1].log_softmax(1)
        expected = predicted.gather(1, tokens[0, 1:, None]).squeeze(1)
        assert document.tokens == tokens[0].tolist()
        assert document.log_probabilities == pytest.approx(expected.tolist(), abs=1e-5)
        assert document.greedy == predicted.argmax(1).tolist()


@pytest.mark.parametrize("use_rslora", [False, True])
def test_single_layers_may_have_ranks_and_scalings_of_their_own(base, use_rslora, tmp_path):
    patterns = {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}, "alpha_pattern": {"up_proj": 11}}
    folder = written(make_adapter(base, 0, "all-linear", use_rslora=use_rslora, **patterns), tmp_path / "tuned")
    mine = take_in(folder, base, tmp_path / "mine-0123456789ab")
    check_record(mine, base, folder)
    work = tmp_path / "merged"
    work.mkdir()
    config = MergeConfig.model_validate({"kind": "merge", "model": "base", "adapter": "mine", "max_difference": 1e-5})
    result = merge(config, StageContext(work, "merged", "0" * 12, {"base": base, "mine": mine}, {}, work))
    assert result.metrics["max_abs_logprob_difference"] < 1e-5


def test_it_is_merged_served_and_trained_on_as_any(base, original, tmp_path):
    mine = take_in(original, base, tmp_path / "mine-0123456789ab")
    inputs, work = {"base": base, "mine": mine}, tmp_path / "merged"
    work.mkdir()
    config = MergeConfig(kind="merge", model="base", adapter="mine", max_difference=1e-5)
    result = merge(config, StageContext(work, "merged", "0" * 12, inputs, {}, work))
    assert result.metrics["max_abs_logprob_difference"] < 1e-5
    assert result.metrics["same_greedy_fraction"] == 1
    assert adapter_folders(["mine"], "base", inputs) == {"mine": mine / "adapter"}

    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    add_adapter(model, AdapterConfig(rank=4, alpha=6), seed=0)
    load_trained_adapter(model, read_start(mine / "adapter", base / "model"))
    document = read_record(mine)[0]
    with torch.no_grad():
        predicted = model(input_ids=torch.tensor([document.input_ids])).logits[0].log_softmax(1)
    found = predicted.gather(1, torch.tensor(document.targets)[:, None]).squeeze(1).tolist()
    assert found == pytest.approx(document.log_probabilities, abs=1e-5)


def test_training_goes_on_with_the_scaling_that_it_was_trained_with(base, original, tmp_path):
    mine = take_in(original, base, tmp_path / "mine-0123456789ab")
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    add_adapter(model, AdapterConfig(rank=4, alpha=8), seed=0)
    with pytest.raises(ModelError, match=r"counts 1.5 times: `adapter:` says 2 "):
        load_trained_adapter(model, read_start(mine / "adapter", base / "model"))


def cut_off(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def pickled(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def without_config(folder):
    (folder / "adapter_config.json").unlink()


def with_tensors(change):
    def damage(folder):
        file = folder / "adapter_model.safetensors"
        save_file({name.replace(*change[:2]): change[2](name, one) for name, one in load_file(file).items()}, file)

    return damage


def as_it_was(_, tensor):
    return tensor


def with_config(**fields):
    def damage(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return damage


def wider(name, tensor):
    return torch.cat([tensor, tensor], dim=int("lora_A" in name)).contiguous()


def without(field):
    def damage(folder):
        file = folder / "adapter_config.json"
        file.write_text(
            json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != field})
        )

    return damage


def of_dtype(dtype):
    return lambda name, tensor: tensor.to(dtype) if "layers.1.mlp.up_proj.lora_A" in name else tensor


def shorter(name, tensor):
    return tensor[:-1].contiguous() if "layers.1.mlp.up_proj.lora_A" in name else tensor


def scalar(name, tensor):
    return torch.tensor(1.0) if "layers.1.mlp.up_proj.lora_A" in name else tensor


def nothing_in_b(name, tensor):
    return torch.zeros_like(tensor) if "lora_B" in name else tensor


def not_a_number(name, tensor):
    return torch.full_like(tensor, torch.nan) if "layers.1.mlp.up_proj.lora_A" in name else tensor


ENDLESS = r"(?:[a-z._\d]|[a-z._\d]{2})+[A-Z]"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_off, "reading the adapter in .*: "),
        (pickled, r"has pickled weights only \(adapter_model.bin\)"),
        (without_config, "no file to take that matches 'adapter_config.json'"),
        (with_tensors(("lora_B", "lora_X", as_it_was)), "lora_X.* unexpected or without a partner"),
        (with_tensors(("q_proj", "query", as_it_was)), r"query.weight \(missing\)"),
        (with_tensors(("model.layers.1", "model.layers.7", as_it_was)), r"layers.7.*\(missing\)"),
        (with_tensors(("", "", wider)), r"does not belong to .*base-0123456789ab/model, where 14 of these"),
        (with_tensors(("", "", not_a_number)), r"layers.1.mlp.up_proj.lora_A.weight \(1 in all\) holds .* not finite"),
        (with_tensors(("", "", nothing_in_b)), "the adapter does nothing: 4 texts"),
        (with_config(init_lora_weights="pissa_niter_16"), "pissa_niter_16, which has changed its base"),
        (with_config(base_model_name_or_path="sft-00000000dead"), "was trained on sft-00000000dead, not on base-01"),
        (with_config(rank_pattern={"q_proj": 2}), r"q_proj \(4\).* has another rank than adapter_config.json gives it"),
        (
            with_config(rank_pattern={ENDLESS: 2}),
            "a pattern of rank_pattern cannot be compared .*: takes over 0.3 s",
        ),
        (with_config(alpha_pattern={ENDLESS: 2}), "a pattern of alpha_pattern cannot be compared .*: takes over 0.3 s"),
        (with_config(rank_pattern={"q_(": 2}), r"a pattern of rank_pattern .*: missing \)"),
        (with_config(r=0), "adapter_config.json: the field `r`: found '0', expected a whole number above 0; take"),
        (with_config(r=True), "the field `r`: found 'true'"),
        (with_config(r=4.0), "the field `r`: found '4.0'"),
        (without("r"), "the field `r`: found nothing, expected a whole number above 0"),
        (without("lora_alpha"), "the field `lora_alpha`: found nothing, expected a number other than 0"),
        (with_config(lora_alpha=0), "the field `lora_alpha`: found '0'"),
        (with_config(lora_alpha="8"), "the field `lora_alpha`: found '8'"),
        (with_config(lora_alpha=None), "the field `lora_alpha`: found 'null'"),
        (with_config(lora_alpha=math.nan), "the field `lora_alpha`: found 'NaN'"),
        (with_config(lora_alpha=10**400), "the field `lora_alpha`: found '1000"),
        (with_config(rank_pattern=["q_proj"]), "the field `rank_pattern`: found .* expected a mapping of patterns"),
        (with_config(alpha_pattern={"q_proj": "8"}), "the field `alpha_pattern`: found .* each to a number other than"),
        (with_config(use_rslora="yes"), "the field `use_rslora`: found 'yes', expected true, false or null"),
        (with_config(modules_to_save="norm"), "the field `modules_to_save`: found 'norm', expected a list of names"),
        (
            with_tensors(("", "", of_dtype(torch.float8_e4m3fn))),
            r"up_proj.lora_A.weight \(F8_E4M3, .* of F64, F32, F16",
        ),
        (with_tensors(("", "", of_dtype(torch.int8))), r"up_proj.lora_A.weight \(I8, .* expected numbers of F64"),
        (with_tensors(("", "", of_dtype(torch.complex64))), r"up_proj.lora_A.weight \(C64, .* expected numbers of F64"),
        (
            with_tensors(("", "", shorter)),
            r"up_proj.lora_A.weight \(F32, \[3, 32\]\), .* expected as many rows of A as",
        ),
        (with_tensors(("", "", scalar)), r"up_proj.lora_A.weight \(F32, \[\]\).* expected a matrix for each factor"),
        (with_config(alora_invocation_tokens=[1, 2]), "with alora_invocation_tokens: "),
        (with_config(something_new=True), "with something_new: True"),
        (with_config(peft_type="IA3"), "is a IA3"),
        (with_config(bias="all"), "with bias: all"),
    ],
)
def test_what_is_no_adapter_of_its_base_is_refused_by_name(base, original, tmp_path, monkeypatch, damage, said):
    monkeypatch.setattr(files, "PATTERNS_LIMIT_S", 0.3)
    damaged = shutil.copytree(original, tmp_path / "damaged")
    damage(damaged)
    with pytest.raises((ModelError, DownloadError), match=said):
        take_in(damaged, base, tmp_path / "work")


@pytest.mark.parametrize("fields", [{"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_what_cannot_stand_beside_its_base_is_refused_by_name(base, tmp_path, fields):
    folder = written(make_adapter(base, 0, ["q_proj"], **fields), tmp_path / "tuned")
    with pytest.raises(LifecycleError, match=next(iter(fields))):
        take_in(folder, base, tmp_path / "work")


def test_an_adapter_of_another_model_is_refused(original, tmp_path):
    other = tmp_path / "other-0123456789ab"
    make_base(other, **{**SIZES, "intermediate_size": 64})
    with pytest.raises(ModelError, match=r"gate_proj.weight \(\[64, 32\]\)"):
        take_in(original, other, tmp_path / "work")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"adapter": "file:///tuned"}, "go together; name both"),
        ({"model": "builtin/qwen3-1m", "base": "base"}, "go together; name both"),
        ({"adapter": "file:///tuned", "base": "base", "files": ["*"]}, "`files` is not for an `adapter`"),
        ({"adapter": "file:///tuned", "base": "base", "model": "builtin/qwen3-1m"}, "either"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        DownloadConfig.model_validate({"kind": "download", **fields})
