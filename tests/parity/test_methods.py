"""Every training method learns under every layout of both engines what a plain Transformers loop learns, in fp32.

The loop takes the global batch as one, so that a method that did not count over all of it would be seen; its losses are
held to TRL's by unit tests. `make test` has each method under each layout, with an adapter or without; `make nightly`
the others.
"""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stages.data.batch import Candidates
from stages.data.dataset import Description, PackedDataset
from stages.data.prepare import DatasetWriter
from stages.data.tokenizer import TokenizedDocument
from stages.data.units import Unit
from stages.kinds.train.batches import BatchSource
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.grpo import GrpoConfig, GrpoLoss
from stages.kinds.train.methods.registry import METHODS as METHODS_THERE_ARE
from tests.pairwise import pairwise
from tests.parity.methods_program import NUM_STEPS, VOCABULARY, with_rollouts

ROW_TOKENS, LEARNING_RATE, EPSILON, SEED = 24, 5e-3, 1e-3, 3
PAIRS = [[(7, 5), (6, 6)], [(12, 12)], [(4, 8), (5, 6)], [(10, 14)]]
"""Lengths in tokens of each row's chosen and rejected documents, which begin with a prompt of two tokens."""
ANSWERS = [[(7, True), (6, False), (5, True)], [(20, False)], [(9, True), (11, False)], [(24, True)]]
"""Lengths in tokens and labels (good or bad) of the documents in each row. Two of the documents fill a row alone."""
METHODS = {
    "dpo": {"method": "dpo", "dpo": {"rpo_alpha": 0.5, "ld_alpha": 0.3}},
    "dpo-free": {"method": "dpo", "dpo": {"loss_type": ["ipo", "sft"], "loss_weights": [1, 2], "reference": "none"}},
    "simpo": {"method": "simpo"},
    "orpo": {"method": "orpo"},
    "cpo": {"method": "cpo"},
    "kto": {"method": "kto", "kto": {"desirable_weight": 4.0, "undesirable_weight": 0.25}},
    "apo": {"method": "kto", "kto": {"loss_type": "apo_zero_unpaired"}},
}
DISTILL = {
    "distill": {"loss_top_k": VOCABULARY},
    "distill-top": {"loss_top_k": 5, "temperature": 2.0, "beta": 0.0},
    "distill-reverse": {"loss_top_k": 5, "beta": 1.0},
}
METHODS |= {name: {"method": "distill", "teacher": "teacher", "distill": options} for name, options in DISTILL.items()}
GRPO = {
    "grpo": {"loss_type": "dapo", "epsilon": 0.01, "importance_sampling_clip_max": 1.1},
    "grpo-mean": {"loss_type": "grpo", "beta": 0.04},
    "grpo-gspo": {"loss_type": "dr_grpo", "max_completion_length": 20, "importance_sampling_level": "sequence"},
}
METHODS |= {name: {"method": "sft", "grpo": options} for name, options in GRPO.items()}
ADAPTER = {"rank": 4, "alpha": 8}
LAYOUTS = {
    ("fsdp", 1): [{"micro_batch_size": 2}],
    ("fsdp", 2): [{"dp_shard": 2}, {"cp": 2, "micro_batch_size": 2}],
    ("megatron", 2): [{"tp": 2, "micro_batch_size": 2}, {"pp": 2}],
}


Chosen = tuple[str, int, str, int, bool]
"""Type of a test case: engine, number of processes, method, index of the layout, and a flag for an adapter."""
ALL: list[Chosen] = [
    (engine, processes, name, number, adapter)
    for (engine, processes), layouts in LAYOUTS.items()
    for name in METHODS
    for number in range(len(layouts))
    for adapter in (False, True)
]
SLICED = "fsdp", 2, 1
"""Layout of which `make test` has two methods, as of Megatron's `cp`."""
FEW = pairwise(
    [one for one in ALL if (*one[:2], one[3]) != SLICED],
    lambda one: {"layout": (*one[:2], one[3]), "method": one[2], "adapter": one[4]},
)


def test_every_method_is_here():
    here = {"grpo" if "grpo" in fields else fields["method"] for fields in METHODS.values()}
    assert here | {"sft", "reward"} == METHODS_THERE_ARE.keys(), "reward: see test_methods.py of the pipeline"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Provide a folder with packed rows of each kind (`data`), a model (`model`) and a larger one (`teacher`)."""
    folder = tmp_path_factory.mktemp("methods")
    generator = np.random.default_rng(1)
    pairs = [[Unit(tuple(document(generator, length) for length in pair)) for pair in row] for row in PAIRS]
    answers = [[Unit((answer(generator, *one),), one[1]) for one in row] for row in ANSWERS]
    (folder / "data").mkdir()
    write_rows(folder / "data" / "pairs", pairs)
    write_rows(folder / "data" / "labelled", answers, is_labelled=True)
    write_rows(folder / "data" / "examples", [[replace(unit, is_good=None) for unit in row] for row in answers])
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**sizes, **heads, vocab_size=VOCABULARY, initializer_range=0.2, max_position_embeddings=64)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    config.num_hidden_layers, config.layer_types = 4, config.layer_types * 2
    Qwen3ForCausalLM(config).save_pretrained(folder / "teacher")
    return folder


def write_rows(folder, rows, *, is_labelled=False):
    """Write packed rows in the format of the train stage's prepared data."""
    folder.mkdir()
    writer = DatasetWriter(folder, is_labelled=is_labelled)
    for row in rows:
        writer.write_row(row)
    writer.finish(
        Description(
            sequence_length=ROW_TOKENS,
            packing=True,
            padding_token=0,
            num_rows=writer.num_rows,
            num_documents=writer.num_documents,
            num_tokens=writer.num_tokens,
            num_target_tokens=writer.num_target_tokens,
            num_source_rows=writer.num_rows,
            num_bad_rows=0,
            num_over_long=0,
            conversations=False,
            warnings=(),
            num_good=writer.num_good if is_labelled else None,
        )
    )
    writer.close()


def document(generator, length):
    ids = generator.integers(0, VOCABULARY, length, dtype=np.int32)
    return TokenizedDocument(ids, np.arange(length) >= 2)


def answer(generator, length, is_good):
    """Return random token ids of an answer; good ones end in equal tokens, which training makes likelier."""
    found = document(generator, length)
    found.ids[2:] = 7 if is_good else found.ids[2:]
    return found


def train_config(engine, layout, fields, adapter):
    return {
        "kind": "train",
        "engine": engine,
        "model": "base",
        "data": {"dataset": "data", "sequence_length": ROW_TOKENS},
        "layout": layout,
        "global_batch_size": len(PAIRS),
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": EPSILON,
        "max_grad_norm": None,
        "precision": "fp32",
        "seed": SEED,
        **({"adapter": ADAPTER} if adapter else {}),
        **fields,
    }


@pytest.mark.parametrize("chosen", ["few", pytest.param("others", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("engine", "processes"), LAYOUTS, ids=lambda value: str(value))
def test_every_layout_learns_what_one_process_of_transformers_learns(
    request, folder, tmp_path, engine, processes, chosen
):
    ranks = request.getfixturevalue(f"{engine}_ranks")
    layouts = LAYOUTS[engine, processes]
    cases = {
        f"{name}-{number}{'-adapter' * adapter}": train_config(engine, layouts[number], METHODS[name], adapter)
        for one in ALL
        if one[:2] == (engine, processes) and (one in FEW) == (chosen == "few")
        for _, _, name, number, adapter in [one]
    }
    if processes == 2 and chosen == "few":
        split = {"cp": 2, "micro_batch_size": 2}
        cases |= {f"{name}-cp": train_config(engine, split, METHODS[name], False) for name in ("distill-top", "grpo")}
    program = "methods_program" if engine == "fsdp" else "megatron_methods_program"
    check(folder, cases, tmp_path, partial(ranks.run, f"tests.parity.{program}", processes))


@pytest.mark.nightly
def test_spread_experts_learn_what_one_process_of_transformers_learns(folder, fsdp_ranks, tmp_path):
    sizes = {"hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8, "num_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    options = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "max_position_embeddings": 64}
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    (mixture / "data").symlink_to(folder / "data")
    for name in ("model", "teacher"):
        torch.manual_seed(len(name))
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **options)).save_pretrained(mixture / name)
    cases = {name: train_config("fsdp", {"dp_shard": 2, "ep": 2}, fields, False) for name, fields in METHODS.items()}
    check(mixture, cases, tmp_path, partial(fsdp_ranks.run, "tests.parity.methods_program", 2))


def check(folder, cases, tmp_path, run):
    """Run the cases on several processes, and compare each with a plain loop."""
    folders = {name: str(folder / name) for name in ("data", "model", "teacher")}
    spec = {**folders, "output": str(tmp_path), "cases": cases}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    run(tmp_path / "spec.json", log=tmp_path / "log.txt")
    for name, fields in cases.items():
        expected, weights = trained_plainly(folder, dict(fields))
        assert name.split("-")[0] != "kto" or expected[-1]["metrics"]["kl"] > 1e-3, "or nothing is compared"
        found = json.loads((tmp_path / f"{name}.json").read_text())
        for step, outcome in zip(expected, found, strict=True):
            assert outcome["metrics"] == pytest.approx(step["metrics"], rel=1e-5, abs=1e-6), name
            assert outcome["loss"] == pytest.approx(step["loss"], rel=1e-5), name
            assert outcome.get("grad_norm", 0.0) == pytest.approx(step.get("grad_norm", 0.0), rel=1e-5), name
        if fields.get("adapter"):
            exported = load_file(tmp_path / name / "adapter_model.safetensors")
        else:
            exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters())
        assert exported.keys() == weights.keys()
        for weight in weights:
            torch.testing.assert_close(exported[weight], weights[weight], rtol=0, atol=1e-5, msg=f"{name} {weight}")


def trained_plainly(folder, config):
    """Train in a plain loop over Transformers; return step metrics, evaluation, and final weights."""
    grpo = config.pop("grpo", None)
    config = TrainConfig.model_validate_json(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    if config.adapter:
        torch.manual_seed(SEED)
        options = peft.LoraConfig(r=ADAPTER["rank"], lora_alpha=ADAPTER["alpha"], target_modules="all-linear")
        model = peft.get_peft_model(model, options)
    dataset = PackedDataset(folder / "data" / ("labelled" if grpo else config.learning.rows))
    source = BatchSource(dataset, len(dataset), config.learning.batch_change(config.method_options))
    batch = source.batch(range(len(dataset)))
    if config.needs_reference:
        with torch.no_grad():
            batch = batch.with_reference(batch.signal.log_probabilities(log_probabilities(model, batch)))
    if grpo:
        with torch.no_grad():
            batch = with_rollouts(batch, log_probabilities(model, batch))
    if config.teacher_tokens:
        batch = taught(folder, config.teacher_tokens, batch)
    other = dataset.mismatched(range(len(dataset)))
    with torch.no_grad():
        before = other.signal.log_probabilities(log_probabilities(model, other))
    loss = GrpoLoss(GrpoConfig(**grpo)) if grpo else config.learning.build_loss(config.method_options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0)
    outcomes = []
    for _ in range(NUM_STEPS + 1):
        if config.needs_divergence:
            with torch.no_grad():
                ratios = other.signal.log_probabilities(log_probabilities(model, other)) - before
            batch = batch.with_signal(kl=max(0.0, ratios.mean().item()))
        found, metrics = loss(log_probabilities(model, batch), batch.signal, loss.counts(batch.signal))
        outcome = {"loss": found.item(), "metrics": {name: value.item() for name, value in metrics.items()}}
        outcomes.append(outcome)
        if len(outcomes) <= NUM_STEPS:
            optimizer.zero_grad()
            found.backward()
            outcome["grad_norm"] = torch.nn.utils.get_total_norm(
                [one.grad for one in model.parameters() if one.grad is not None]
            ).item()
            optimizer.step()
    weights = peft.get_peft_model_state_dict(model) if config.adapter else dict(model.named_parameters())
    return outcomes, {name: value.detach() for name, value in weights.items()}


def taught(folder, asked, batch):
    """Return a batch with a teacher's most probable tokens added, computed one document at a time."""
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    whole = torch.arange(VOCABULARY).expand(*batch.signal.targets.shape, VOCABULARY)
    batch = batch.with_signal(temperature=asked.temperature)
    with torch.no_grad():
        values = log_probabilities(teacher, batch.with_signal(candidates=Candidates(whole, torch.empty(0))))[..., 1:]
    values, tokens = values.topk(asked.number)
    return batch.with_signal(candidates=Candidates(tokens, values, asked.number == VOCABULARY))


def log_probabilities(model, batch):
    """Return the log-probabilities of a batch's target tokens, computed with one forward pass for each document."""
    lengths = list(batch.documents.lengths)
    found = []
    for tokens, wanted in zip(
        batch.inputs.input_ids.flatten().split(lengths), batch.signal.wanted.flatten(0, 1).split(lengths), strict=True
    ):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0] / batch.signal.temperature
        values = logits.log_softmax(-1).gather(1, wanted.clamp(min=0))
        found.append(values * (wanted[:, :1] >= 0))
    return torch.cat(found).view_as(batch.signal.wanted).squeeze(-1)
