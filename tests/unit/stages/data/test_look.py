"""`lifecycle data` shows the tokens that training will get, which of them have a loss, and how all rows are used."""

import json

import numpy as np
import pytest

from stages.core.errors import DataError
from stages.data import look as looking
from stages.data.config import DataConfig
from stages.data.dataset import row_order
from stages.data.look import Visits, histogram, look_at
from stages.data.prepare import prepare
from stages.models.facts import ModelFacts

CHATS = [
    {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}!"}]}
    for number in range(40)
]


@pytest.fixture
def look(tmp_path, tokenizer_folder):
    """Provide a function that returns what `lifecycle data` shows of a dataset with given options."""

    def find(folder, rows="examples", num_rows=2, seed=3, **options):
        config = DataConfig(dataset="data", **{"sequence_length": 256, **options})
        cache, scratch = tmp_path / "cache", tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)

        def visits(training):
            return Visits(row_order(len(training), seed, 0)[:num_rows].tolist())

        inputs = {"data": tmp_path / "artifact"}
        inputs["data"].mkdir(exist_ok=True)
        (inputs["data"] / "data").symlink_to(folder) if not (inputs["data"] / "data").exists() else None
        model = ModelFacts(tokenizer_folder)
        return look_at(inputs, config, model, rows=rows, visits=visits, cache=cache, scratch=scratch)

    return find


def texts(document, *, learned):
    return [piece.text for piece in document.pieces if piece.learned is learned]


def test_rows_are_those_of_the_first_step_with_what_is_learned_of_them(look, write_rows, tmp_path, tokenizer_folder):
    folder = write_rows(CHATS)
    found = look(folder, sequence_length=64)
    config = DataConfig(dataset="data", sequence_length=64)
    silent = type("Silent", (), {"progress": lambda *_, **__: None, "warn": lambda *_: None})()
    options = {"rows": "examples", "cache": tmp_path / "other", "report": silent}
    model = ModelFacts(tokenizer_folder)
    prepared = prepare(folder, config, model, bad_rows_file=tmp_path / "bad.jsonl", **options).training
    first = row_order(len(prepared), 3, 0)[:2]
    assert [row.name for row in found.rows] == [f"row {row + 1} of {len(prepared)}" for row in first]
    for shown, row in zip(found.rows, first, strict=True):
        documents = prepared.documents(int(row))
        assert [one.num_tokens for one in shown.documents] == [len(tokens) for tokens, _ in documents]
        assert shown.num_padding_tokens == 64 - sum(len(tokens) for tokens, _ in documents)
        for one in shown.documents:
            question = one.pieces[1].text.removeprefix("user\n").removesuffix("?")
            assert "".join(texts(one, learned=True)) == f"{question}!<|im_end|>"
            assert {piece.text for piece in one.pieces if piece.special} == {"<|im_start|>", "<|im_end|>"}
    (portion,) = found.portions
    assert (portion.num_source_rows, portion.num_documents, portion.num_rows) == (40, 40, len(prepared))
    assert (portion.num_tokens, portion.num_target_tokens) == (prepared.num_tokens, prepared.num_target_tokens)
    assert sum(bar.count for bar in portion.lengths) == 40


@pytest.mark.parametrize(("end", "is_more"), [("<|eot|>", True), ("", False)])
def test_what_the_template_writes_after_the_last_turn_is_said(look, write_rows, tmp_path, end, is_more):
    template = tmp_path / "phi.jinja"  # as Phi-3's: a conversation ends with another special token than a turn
    template.write_text(
        r"{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ 'END' }}{% endif %}".replace(
            "END", end
        )
    )
    found = look(write_rows(CHATS), chat_template=template)
    warnings = [one for one in found.portions[0].warnings if "the last turn of a conversation is learned with" in one]
    assert len(warnings) == is_more
    assert all("learned with '\\n<|eot|>' after the end that all turns have" in one for one in warnings)


def test_it_uses_the_cache_of_training(look, write_rows, monkeypatch):
    folder = write_rows(CHATS)
    first = look(folder)
    monkeypatch.setattr(looking, "LOOK_SECONDS", -1.0)
    assert look(folder) == first


@pytest.mark.parametrize("limit", ["LOOK_SECONDS", "LARGE_BYTES"])
def test_of_data_that_take_too_long_the_first_rows_are_shown_and_nothing_is_kept(
    look, write_rows, monkeypatch, tmp_path, limit
):
    monkeypatch.setattr(looking, "LOOK_SECONDS", -1.0)
    if limit == "LARGE_BYTES":
        monkeypatch.setattr(looking, "LARGE_BYTES", 0)
    (portion,) = look(write_rows(CHATS)).portions
    assert portion.unread_after == "train.jsonl:1"
    assert (portion.num_source_rows, portion.num_documents) == (1, 1)
    assert not [*(tmp_path / "cache").glob("tokenized/*/about.json")]


def test_what_was_left_out_is_counted_by_reason(look, write_rows):
    long = {"messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": "x" * 300}]}
    rows = [*CHATS, {"messages": []}, {"messages": []}, {"text": "x"}, long]
    (portion,) = look(write_rows(rows), on_bad_rows="drop", max_bad_row_fraction=0.5, over_long="drop").portions
    assert (portion.num_bad_rows, portion.num_over_long, portion.num_documents) == (3, 1, 40)
    assert [(one.count, one.example) for one in portion.dropped] == [(2, "train.jsonl:41"), (1, "train.jsonl:43")]
    assert portion.dropped[0].reason == "has an empty list in `messages`; expected messages"


def test_documents_of_pairs_and_labelled_answers_are_named(look, write_rows):
    pairs = [{"prompt": f"{n} = ", "chosen": "good", "rejected": "bad"} for n in range(9)]
    (row,) = look(write_rows(pairs), "pairs", 1, sequence_length=128).rows
    assert [one.name for one in row.documents] == ["chosen", "rejected"] * (len(row.documents) // 2)
    assert {"".join(texts(one, learned=True)) for one in row.documents[:2]} == {"good</s>", "bad</s>"}
    labelled = [{"prompt": f"{n} = ", "completion": "yes" if n % 2 else "no", "label": n % 2 == 1} for n in range(9)]
    (row,) = look(write_rows(labelled, "train.jsonl"), "labelled", 1, sequence_length=64).rows
    answers = {"good answer": "yes</s>", "bad answer": "no</s>"}
    assert [("".join(texts(one, learned=True))) for one in row.documents] == [answers[o.name] for o in row.documents]


def test_both_portions_are_counted_and_rows_in_both_are_warned_of(look, write_rows):
    write_rows([*CHATS[:1], {"messages": CHATS[5]["messages"] * 2}], "test.jsonl")
    found = look(write_rows(CHATS), evaluation_split="test")
    assert [portion.name for portion in found.portions] == ["training", "evaluation"]
    assert "1 of 2 held-out rows are among the training rows too" in found.warnings[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "a and b cannot be mixed"),
        ({"messages": []}, "^b: 40 of 40 rows cannot be learned from"),
        (None, "a and b have the same rows"),
    ],
)
def test_what_training_refuses_of_a_mixture_is_refused(row, message, tmp_path, tokenizer_folder):
    for name, rows in (("a", CHATS), ("b", [row or chat for chat in CHATS[::-1]])):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(datasets=[{"dataset": "a"}, {"dataset": "b"}], sequence_length=64)
    inputs, places = {name: tmp_path / name for name in "ab"}, {"cache": tmp_path / "cache", "scratch": tmp_path}
    with pytest.raises(DataError, match=message):
        look_at(inputs, config, ModelFacts(tokenizer_folder), rows="examples", visits=lambda _: Visits([0]), **places)


def test_what_is_long_is_cut_for_showing_and_counted(look, write_rows, monkeypatch):
    monkeypatch.setattr(looking, "MAX_SHOWN_TOKENS", 30)
    (row,) = look(write_rows(CHATS), num_rows=1, sequence_length=256).rows
    hidden = sum(one.num_hidden_tokens for one in row.documents)
    assert hidden == sum(one.num_tokens for one in row.documents) - 30
    assert row.documents[-1].pieces == ()


def test_bars_hold_every_length_once():
    for lengths in (np.array([7]), np.array([1, 2, 2, 3]), np.random.default_rng(0).integers(3, 5000, 999)):
        bars = histogram(lengths)
        assert len(bars) <= 16
        assert [bar.count for bar in bars] == [int(((lengths >= b.first) & (lengths <= b.last)).sum()) for b in bars]
        assert sum(bar.count for bar in bars) == len(lengths)
