"""A plan reports every problem that is visible in the first rows of datasets or the file headers of models."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.planning.checks import Problems
from flows.running.request import PlannedRefresh, RefreshRequest, make_plan
from stages.core.errors import DataError, LifecycleError, ModelError, RecipeError, TransientError
from stages.hubs.builtin.digits import Drawing

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
SIZES = {"mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16)} | dict.fromkeys(
    (f"self_attn.{name}_proj" for name in "qkvo"), (8, 8)
)
TRAIN = {
    "kind": "train",
    "method": "sft",
    "model": "base",
    "data": {"dataset": "chats", "sequence_length": 64},
    "global_batch_size": 8,
    "learning_rate": 1e-4,
    "layout": {},
}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ROWS = {
    "chats": CHAT,
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "seen": {**CHAT, "images": ["data:image/png;base64,PNG"]},
    "judged": {"conversations": [{"from": "human", "value": "a"}], "chosen": CHAT["messages"][1], "rejected": "c"},
}


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Provide a function that plans a recipe's stages, with a model and datasets on this machine."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    names = {f"model.layers.{layer}.{name}.weight": size for layer in (0, 1) for name, size in SIZES.items()}
    weights = {name: np.ones(size, np.float32) for name, size in names.items()}
    (tmp_path / "model").mkdir()
    save_file(
        {**weights, "model.embed_tokens.weight": np.ones((16, 8), np.float32)}, tmp_path / "model/model.safetensors"
    )
    vocabulary = {"a": 0, "<end>": 2, "<other>": 3}
    files = {
        "config.json": LLAMA,
        "tokenizer.json": {"model": {"vocab": vocabulary}},
        "tokenizer_config.json": {"eos_token": "<end>"},
    }
    for name, content in files.items():
        (tmp_path / "model" / name).write_text(json.dumps(content))
    for name, row in ROWS.items():
        (tmp_path / name).mkdir()
        lines = f"{json.dumps(row)}\n".replace("PNG", base64.b64encode(Drawing("test", 0).png).decode())
        (tmp_path / name / "train.jsonl").write_text(lines * 5)

    def planned(**stages: object) -> PlannedRefresh:
        sources = {name: {"kind": "download", "dataset": f"file://{tmp_path / name}"} for name in ROWS}
        base = {"kind": "download", "model": f"file://{tmp_path / 'model'}"}
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(json.dumps({"stages": {"base": base, **sources, **stages}}))
        return make_plan(RefreshRequest(str(recipe)), may_be_unreachable=True)

    return planned


def of_rows(name: str, **data: object) -> dict[str, object]:
    return {"data": {"dataset": name, "sequence_length": 64, **data}}


def test_what_is_sound_is_planned_without_a_word(planned) -> None:
    adapter = {"rank": 8, "target_modules": ["q_proj", "self_attn.v_proj", "down_proj"], "layers_to_transform": [1]}
    dpo = {**TRAIN, **of_rows("pairs"), "method": "dpo"}
    assert planned(sft={**TRAIN, "adapter": adapter}, all={**TRAIN, "adapter": {"rank": 4}}, dpo=dpo).notes == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"adapter": {"rank": 4, "target_modules": ["q_proj", "v_porj"]}},
            "stages.sft.adapter.target_modules names 'v_porj', which the model does not have; did you mean v_proj?",
        ),
        ({"adapter": {"rank": 9}}, "stages.sft.adapter.rank is 9, more than the width of model.layers.0"),
        ({"adapter": {"rank": 4, "layers_to_transform": [2]}}, "layers_to_transform names 2; the model's layers are 0"),
        (of_rows("pairs"), "stages.sft.data.dataset: the first row has the columns `prompt`, `chosen`, `rejected`"),
        (of_rows("judged"), "they look like preference pairs: `method: dpo`"),
        ({"method": "dpo"}, "stages.sft.data.dataset: the first row has the columns `messages`"),
        ({"method": "kto", **of_rows("pairs")}, "These are preference pairs: `method: dpo`"),
        (
            {**of_rows("seen"), "engine": "megatron"},
            "stages.sft.data.dataset: the rows have media: data with media needs `engine: fsdp`",
        ),
        (
            {**of_rows("seen"), "optimizer": {"name": "muon"}},
            "stages.sft.data.dataset: the rows have media: `optimizer.name: muon` does not go with data with media",
        ),
        (of_rows("chats", evaluation_split="test"), "stages.sft.data.evaluation_split: no files of the split 'test'"),
        (
            {"data": {"datasets": [{"dataset": "chats"}, {"dataset": "pairs"}], "sequence_length": 64}},
            "stages.sft.data.datasets.1.dataset: the first row has the columns",
        ),
    ],
)
def test_a_training_that_cannot_work_is_refused_by_the_plan(planned, changes: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        planned(sft={**TRAIN, **changes})
    assert message.lower() in str(caught.value).lower()


def test_pictures_that_the_recipe_alone_names_are_refused_where_nothing_is_at_hand(planned) -> None:
    hub = {"kind": "download", "dataset": "hf://datasets/org/name", "media": True}
    with pytest.raises(RecipeError, match=r"stages\.sft\.data\.dataset: the rows have media: .* `engine: fsdp`"):
        planned(hub=hub, sft={**TRAIN, **of_rows("hub"), "engine": "megatron"})


def test_bad_rows_are_named_with_the_fraction_that_would_let_them_be_dropped(planned, tmp_path: Path) -> None:
    lines = [CHAT, {"messages": []}, CHAT, CHAT]
    (tmp_path / "chats" / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(RecipeError) as caught:
        planned(sft=TRAIN)
    assert "train.jsonl:2 has an empty list" in str(caught.value)
    assert "`on_bad_rows: drop` and `max_bad_row_fraction: 0.25` to skip them" in str(caught.value)

    dropped = {**TRAIN, **of_rows("chats", on_bad_rows="drop", max_bad_row_fraction=0.24)}
    with pytest.raises(RecipeError, match=r"raise `max_bad_row_fraction` to 0\.25"):
        planned(sft=dropped)
    planned(sft={**TRAIN, **of_rows("chats", on_bad_rows="drop", max_bad_row_fraction=0.25)})


def test_rows_beyond_the_first_thousand_are_left_to_the_check(planned, tmp_path: Path) -> None:
    rows = tmp_path / "chats" / "train.jsonl"
    rows.write_text(f"{json.dumps(CHAT)}\n" * 1000 + '{"messages": []}\n')
    planned(sft=TRAIN)


def test_all_problems_are_said_at_once(planned) -> None:
    scores = {"kind": "evaluate", "model": "sft", "tasks": ["nowhere"], "task_folder": "missing"}
    promote = {"kind": "promote", "name": "mine", "model": "sft", "evaluations": ["scores"], "gates": {}}
    with pytest.raises(LifecycleError) as caught:
        planned(
            far={"kind": "download", "dataset": "file:///nowhere/at/all"},
            sft=TRAIN,
            lora={**TRAIN, "adapter": {"rank": 4, "target_modules": ["v_porj"]}},
            dpo={**TRAIN, "method": "dpo"},
            scores={**scores, "serving": {"max_model_len": 4096}},
            promote={**promote, "gates": {"min_scores": {"nowhere.acc": 70}}},
        )
    for part in (
        "stages.far.dataset: ",
        "stages.lora.adapter.target_modules names 'v_porj'",
        "stages.dpo.data.dataset: the first row",
        "stages.scores.task_folder: there is no file or folder",
        "stages.scores.serving.max_model_len",
        "stages.promote.gates.min_scores: nowhere.acc is a share",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([DataError("a")], DataError),
        ([DataError("a"), DataError("b"), TransientError("c")], DataError),
        ([DataError("a"), ModelError("b")], RecipeError),
        ([TransientError("a"), TransientError("b")], TransientError),
    ],
)
def test_another_attempt_is_made_only_where_nothing_else_is_wrong(
    errors: list[LifecycleError], kind: type[LifecycleError]
) -> None:
    problems = Problems()
    for error in errors:
        problems.add(error)
    with pytest.raises(LifecycleError) as caught:
        problems.check()
    assert type(caught.value) is kind
    assert str(caught.value).splitlines() == [str(error) for error in errors]


@pytest.mark.parametrize(
    ("generation", "eos", "warned"),
    [(None, "<other>", True), ({"eos_token_id": [3, 2]}, "<end>", False), ({"eos_token_id": 3}, "<end>", True)],
)
def test_an_end_of_texts_at_which_generation_does_not_stop_is_warned_of(
    planned, tmp_path: Path, generation: object, eos: str, warned: bool
) -> None:
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    if generation:
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    notes = planned(sft=TRAIN).notes
    assert [f"the tokenizer ends texts with '{eos}'" in note for note in notes] == [True] * warned


def test_a_field_that_is_wrong_hides_no_problem_of_other_stages(planned) -> None:
    circle = {name: {**TRAIN, "method": "dpo", "model": other} for name, other in (("one", "two"), ("two", "one"))}
    with pytest.raises(RecipeError) as caught:
        planned(
            sft={**TRAIN, "lerning_rate": 3},
            after={**TRAIN, "model": "sft", "adapter": {"rank": 4, "target_modules": ["of_no_model"]}},
            lost={**TRAIN, "model": "nowhere"},
            lora={**TRAIN, "adapter": {"rank": 4, "target_modules": ["v_porj"]}},
            clean={"kind": "curate", "datasets": ["chats"], "decontaminate": {}},
            **circle,
        )
    message = str(caught.value)
    for part in ("stages.sft.lerning_rate: unknown", "stages.lost.model: there is no stage", "names 'v_porj'"):
        assert part in message
    assert "of_no_model" not in message, "its model is that of a stage that is not known yet"
    assert "stages.clean" not in message, "its benchmarks may be those of a stage that is not known yet"
