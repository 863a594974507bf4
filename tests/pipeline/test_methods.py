"""Train stages of KTO, distillation and reward models learn the same on one process and on two."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from stages.core.contract import StageResult
from stages.kinds.train.check_model import InputModels
from stages.kinds.train.run import run
from stages.kinds.train.teacher import check_teacher
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.registry import new_launch_spec
from stages.serving.server import started_server
from tests.damage import flip_bit
from tests.serving import SERVING
from tests.train_stage import logged, make_artifacts, make_config, make_context, make_teacher, run_to_end

TEXTS = {"dataset": "problems", "evaluation_split": "validation", "sequence_length": 64}

SAMPLING = {"max_completion_length": 8, "serving": {"enforce_eager": True, "kv_cache_memory_gib": 0.0625}}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def labelled(artifacts, tmp_path_factory):
    """Provide artifacts in which each answer of a preference pair is a row of its own, labelled good or bad."""
    folder = tmp_path_factory.mktemp("labelled")
    (folder / "data").mkdir()
    for path in (artifacts["preferences"] / "data").iterdir():
        pairs = map(json.loads, path.read_text().splitlines())
        rows = [
            {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for pair in pairs
            for side in ("chosen", "rejected")
        ]
        (folder / "data" / path.name).write_text("\n".join(map(json.dumps, rows)))
    return {**artifacts, "preferences": folder}


def test_kto_on_two_processes_is_kto_on_one(labelled, tmp_path):
    metrics = []
    for name, layout in {"alone": {"micro_batch_size": 4}, "shared": {"dp_shard": 2, "micro_batch_size": 1}}.items():
        config = make_config("kto", steps=6, layout=layout, kto={"desirable_weight": 4.0, "undesirable_weight": 0.25})
        context = make_context(tmp_path / name / "work", labelled, config)
        if name == "alone":
            run(config, context)
        else:
            run_to_end(context.work, config)
        metrics.append(logged(context.work))
    for one, two in zip(*metrics, strict=True):
        for metric in ("loss", "kl", "reward_chosen", "reward_rejected", "reward_margin"):
            assert two[metric] == pytest.approx(one[metric], rel=1e-6, abs=1e-6), metric
    divergences = [row["kl"] for row in metrics[0]]
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert max(divergences) > 1e-3, "or nothing was compared"


@pytest.fixture(scope="module")
def with_teacher(artifacts, tmp_path_factory):
    """Provide artifacts with a `teacher`: the base model with other weights."""
    return {**artifacts, "teacher": make_teacher(artifacts, tmp_path_factory.mktemp("teacher"))}


def test_a_teacher_is_asked_once_and_learned_from_alike_on_two_processes(with_teacher, tmp_path):
    losses, written = [], []
    for name, layout in {
        "alone/first": {"micro_batch_size": 4},
        "alone/again": {"micro_batch_size": 2},
        "shared/first": {"dp_shard": 2, "micro_batch_size": 1},
    }.items():
        fields = {"data": TEXTS, "teacher": "teacher", "distill": {"loss_top_k": 8}}
        config = make_config("distill", steps=8, layout=layout, **fields)
        context = make_context(tmp_path / name, with_teacher, config)
        if name.startswith("alone"):
            run(config, context)
        else:
            run_to_end(context.work, config)
        losses.append([row["loss"] for row in logged(context.work)])
        kept = sorted((context.cache / "teacher").glob("*.npy"))
        written.append({path.name: (path.stat().st_ino, path.read_bytes()) for path in kept})
        if name == "alone/first":
            flip_bit(kept[0], kept[0].stat().st_size // 2)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < 0.7 * losses[0][0]
    damaged, *others = sorted(written[0])
    assert all(written[1][name] == written[0][name] for name in others), "the teacher's records were cached"
    # Another inode: the new file is made while the damaged one exists, and inode numbers need not rise.
    assert written[1][damaged][0] != written[0][damaged][0], "a damaged file is written again"
    assert written[2].keys() == written[0].keys()
    assert len(written[0]) == 2, "of the rows that are learned from, and of those held out"


@pytest.fixture(scope="module")
def served_teacher(with_teacher, tmp_path_factory):
    """Provide a recipe's config of a distillation teacher that a running vLLM server serves."""
    folder = tmp_path_factory.mktemp("served")
    spec = new_launch_spec(
        with_teacher["teacher"] / "model", "wise", ServingConfig(**{**SERVING, "max_model_len": 128})
    )
    with (
        started_server(spec, ServeExecution(), folder / "server.log", folder / "server") as server,
        pytest.MonkeyPatch.context() as environment,
    ):
        server.wait_until_ready(500)
        environment.setenv("TEACHER_KEY", server.api_key)
        yield {"url": f"{server.url}/v1", "served_model": "wise", "key_variable": "TEACHER_KEY"}


def test_a_served_teacher_says_what_the_model_says(with_teacher, served_teacher, tmp_path):
    """Distillation from a served teacher on two processes learns the same as from a local teacher on one process."""
    config = make_config("distill", steps=8, data=TEXTS, teacher="teacher", distill={"loss_top_k": 8})
    alone = make_context(tmp_path / "model" / "work", with_teacher, config)
    run(config, alone)
    options = {"loss_top_k": 8, "teacher_server": served_teacher}
    layout = {"dp_shard": 2, "micro_batch_size": 1}
    config = make_config("distill", steps=8, data=TEXTS, layout=layout, distill=options)
    shared = make_context(tmp_path / "served" / "work", with_teacher, config)
    assert list(check_teacher(config, InputModels.of(config, with_teacher))) == []
    run_to_end(shared.work, config)
    losses = [[row["loss"] for row in logged(one.work)] for one in (alone, shared)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < 0.7 * losses[0][0]
    config = make_config("distill", data=TEXTS, distill={**options, "loss_top_k": 21})
    (problem,) = check_teacher(config, InputModels.of(config, with_teacher))
    assert "greater than max allowed: 20" in str(problem)
    assert "--max-logprobs 21" in str(problem)


TAUGHT_BY = {
    "model": {"teacher": "teacher", "layout": {"dp_shard": 2, "micro_batch_size": 1}},
    "server": {"engine": "megatron", "layout": {"tp": 2, "micro_batch_size": 1}},
}


@pytest.mark.parametrize("by", [pytest.param("model", marks=pytest.mark.nightly), "server"])
def test_answers_of_the_model_itself_are_taught(with_teacher, served_teacher, tmp_path, by):
    """On-policy distillation has the loss that Transformers computes over the answers, of a local or served teacher.

    Two processes share the rows, or each row, of which one asks the server. The learning rate is so small that both
    steps use the initial weights. In `make test`, the other case covers the nightly one of a local teacher, and so does
    `test_answers_that_a_teacher_is_asked_about…` in `test_grpo.py`.
    """
    distill = {"loss_top_k": 8, "beta": 0.0, "lmbda": 1.0, "sampling": SAMPLING}
    distill |= {"teacher_server": served_teacher} if by == "server" else {}
    config = make_config("distill", steps=2, data=TEXTS, learning_rate=1e-12, distill=distill, **TAUGHT_BY[by])
    context = make_context(tmp_path / "work", with_teacher, config)
    run_to_end(context.work, config)
    rows = logged(context.work)
    assert [row["on_policy"] for row in rows] == [1.0, 1.0]
    answers = json.loads((context.work / "scratch" / "rollouts" / "answers.json").read_text())
    assert len(list((context.cache / "teacher").glob("*.npy"))) == 1, "of the held-out rows alone"
    shown = list(map(json.loads, (context.work / "completions.jsonl").read_text().splitlines()))
    assert {one["step"] for one in shown} == {1, 2}
    last = AutoTokenizer.from_pretrained(with_teacher["base"] / "model").decode(answers[0]["prompt"])
    assert next(one["prompt"] for one in shown if one["step"] == 2) == last
    assert "completions.jsonl" in StageResult.model_validate_json((context.work / "result.json").read_text()).files
    models = [
        AutoModelForCausalLM.from_pretrained(with_teacher[one] / "model", dtype=torch.float32)
        for one in ("base", "teacher")
    ]
    assert len(answers) >= 4
    assert {len(one["completion"]) for one in answers} <= set(range(1, 9))
    assert rows[-1]["loss"] == pytest.approx(_divergence(*models, answers), rel=1e-4)


def _divergence(model, teacher, documents):
    """Return KL(teacher ‖ model) over the teacher's top 8 tokens and the rest, as mean over answer tokens in nats."""
    divergences = []
    for document in documents:
        first = len(document["prompt"]) - 1
        with torch.no_grad():
            tokens = torch.tensor([document["prompt"] + document["completion"]])
            its, own = (each(tokens).logits[0, first:-1].softmax(-1) for each in (teacher, model))
        likeliest = its.topk(8).indices
        kept = [shares.gather(1, likeliest) for shares in (its, own)]
        its, own = (torch.cat([shares, 1 - shares.sum(-1, keepdim=True)], -1) for shares in kept)
        divergences += (its * (its / own).log()).sum(-1).tolist()
    return sum(divergences) / len(divergences)


def test_a_reward_model_scores_as_transformers_scores_it(artifacts, tmp_path):
    """A reward model's scores and held-out accuracy are those of its files in Transformers, on one process or two."""
    losses = []
    for name, layout in {"shared": {"dp_shard": 2, "micro_batch_size": 1}, "alone": {"micro_batch_size": 2}}.items():
        config = make_config("reward", steps=8, layout=layout, reward={"center_rewards_coefficient": 0.01})
        context = make_context(tmp_path / name / "work", artifacts, config)
        if name == "alone":
            run(config, context)
        else:
            run_to_end(context.work, config)
        losses.append([row["loss"] for row in logged(context.work)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
    folder = tmp_path / "shared" / "work" / "reward_model"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1
    metrics = StageResult.model_validate_json((tmp_path / "shared" / "work" / "result.json").read_text()).metrics
    pairs = map(json.loads, (artifacts["preferences"] / "data" / "validation.jsonl").read_text().splitlines())
    texts = [
        tokenizer.apply_chat_template(pair["prompt"] + pair[side], tokenize=False)
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    with torch.no_grad():
        scores = model(**tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)).logits.squeeze(
            1
        )
    margins = scores[0::2] - scores[1::2]
    assert margins.mean().item() == pytest.approx(metrics["evaluation_reward_margin"], rel=1e-4, abs=1e-5)
    assert (margins > 0).float().mean().item() == pytest.approx(metrics["evaluation_preference_accuracy"])
