"""Rows of mixed datasets come in the requested proportions, in an order computed from the seed alone."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stages.core.contract import StageInput
from stages.core.errors import DataError
from stages.data.config import DataConfig
from stages.data.dataset import row_order
from stages.data.mixture import MixtureOrder
from stages.data.prepare import prepare_mixture
from stages.kinds.download.config import DownloadConfig
from stages.kinds.train.check import check
from stages.kinds.train.order import seen, shares_asked, slots_of
from stages.models.facts import ModelFacts
from tests.train_stage import make_config
from tests.unit.stages.data.reports import Reports

SIZES = (10, 20, 5)
OF_SHARES = (0.7, 0.25, 0.05)


def test_one_dataset_is_visited_epoch_after_epoch():
    order = MixtureOrder((7,), (1.0,), 3)
    assert order.rows(0, 14) == [*row_order(7, 3, 0), *row_order(7, 3, 1)]


@given(seed=st.integers(0, 2**32), first=st.integers(0, 500), count=st.integers(1, 200))
def test_any_stretch_of_slots_is_the_same_alone_and_has_every_dataset_s_share(seed, first, count):
    order = MixtureOrder(SIZES, OF_SHARES, seed)
    rows = order.rows(0, first + count)
    assert order.rows(first, count) == rows[first:]
    members = np.searchsorted([10, 30], rows, side="right")
    assert np.bincount(members, minlength=3).tolist() == order.taken(first + count)
    assert np.bincount(rows, minlength=35).tolist() == order.times(first + count).tolist()
    counts = np.bincount(members[first:], minlength=3)
    assert abs(counts - count * np.array(OF_SHARES)).max() < 4


def test_far_slots_are_found_at_once_and_each_dataset_has_whole_epochs():
    order = MixtureOrder(SIZES, OF_SHARES, 0)
    far = 10**12
    assert np.array(order.taken(far)) / far == pytest.approx(OF_SHARES, rel=1e-6)
    times = order.times(1000)
    for begin, end in ((0, 10), (10, 30), (30, 35)):
        assert np.ptp(times[begin:end]) <= 1


@pytest.fixture
def prepared(tmp_path, tokenizer_folder):
    """Provide a function that prepares a mixture of datasets as training data, and collects the warnings."""

    def prepare(rows, kind="examples", **options):
        inputs = {}
        for stage, of_stage in rows.items():
            inputs[stage] = tmp_path / stage
            (inputs[stage] / "data").mkdir(parents=True, exist_ok=True)
            for split, lines in of_stage.items():
                (inputs[stage] / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        reports = Reports()
        prepare.config = DataConfig(**{"sequence_length": 64, **options})
        prepare.warnings = reports.warnings
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        return prepare_mixture(
            inputs,
            prepare.config,
            ModelFacts(tokenizer_folder),
            rows=kind,
            cache=tmp_path / "cache",
            report=reports,
            work=work,
        )

    return prepare


def texts(word, number, length=5):
    return [{"text": f"{word} {index} " + "x" * length} for index in range(number)]


def alpaca(number):
    return [{"instruction": f"What is {index}?", "output": f"It is {index}."} for index in range(number)]


TWO = {"new": {"train": texts("new", 30)}, "old": {"train": alpaca(20)}}


def test_each_dataset_has_a_format_of_its_own_and_rows_as_alone(prepared):
    parts = [{"dataset": "new", "weight": 3, "format": "text"}, {"dataset": "old", "weight": 1, "train_on": "all"}]
    mixed = prepared(TWO, datasets=parts).training
    new = prepared(TWO, dataset="new", format="text").training
    old = prepared(TWO, dataset="old", train_on="all").training
    assert len(mixed) == len(new) + len(old)
    assert mixed.num_documents == new.num_documents + old.num_documents
    both = mixed.batch([0, len(new), 1])
    apart = [new.batch([0]), old.batch([0]), new.batch([1])]
    assert torch.equal(both.inputs.input_ids, torch.cat([one.inputs.input_ids for one in apart]))
    assert torch.equal(both.signal.targets, torch.cat([one.signal.targets for one in apart]))
    found = mixed.row_documents([len(new)])
    assert found.tolist() == (old.row_documents([0]) + new.num_documents).tolist()


def test_a_mixture_of_one_is_the_dataset(prepared):
    alone = prepared(TWO, dataset="new").training
    one = prepared(TWO, datasets=[{"dataset": "new", "weight": 0.5}]).training
    assert one.key == alone.key
    assert slots_of(prepared.config, one, 3).rows(0, len(one)) == row_order(len(one), 3, 0).tolist()


@pytest.mark.parametrize("unit", ["rows", "tokens"])
@pytest.mark.parametrize("packing", [True, False])
def test_shares_that_are_seen_are_those_that_are_asked_for(prepared, unit, packing):
    rows = {"new": {"train": texts("new", 40, 40)}, "old": {"train": texts("old", 60)}}
    parts = [{"dataset": "new", "weight": 7}, {"dataset": "old", "weight": 3}]
    training = prepared(rows, datasets=parts, mixing={"weight_by": unit}, packing=packing).training
    asked = shares_asked(prepared.config, training)
    assert asked == pytest.approx({"new": 0.7, "old": 0.3})
    slots = slots_of(prepared.config, training, 0)
    found = seen(prepared.config, training, slots, 2000)
    assert found["share_seen.new"] == pytest.approx(0.7, abs=0.01)
    visited = slots.rows(0, 2000)
    amounts = training.row_lengths if unit == "tokens" else np.ones(len(training))
    first = len(training.members["new"])
    counted = sum(amounts[row] for row in visited if row < first) / sum(amounts[row] for row in visited)
    assert found["share_seen.new"] == pytest.approx(counted)
    assert found["epochs.new"] == pytest.approx(sum(row < first for row in visited) / first)


def test_without_weights_shares_are_as_the_sizes_tempered(prepared):
    parts = [{"dataset": "new"}, {"dataset": "old"}]
    rows = {"new": {"train": texts("new", 90)}, "old": {"train": texts("old", 10)}}
    training = prepared(rows, datasets=parts, packing=False).training
    assert shares_asked(prepared.config, training)["new"] == pytest.approx(0.9)
    training = prepared(rows, datasets=parts, packing=False, mixing={"temperature": 2}).training
    assert shares_asked(prepared.config, training)["new"] == pytest.approx(0.75)


def test_concatenated_every_row_comes_once_an_epoch(prepared):
    parts = [{"dataset": "new"}, {"dataset": "old"}]
    training = prepared(TWO, datasets=parts, mixing={"strategy": "concat"}).training
    slots = slots_of(prepared.config, training, 0)
    assert sorted(slots.rows(0, len(training))) == list(range(len(training)))
    assert slots.rows(0, len(training)) == row_order(len(training), 0, 0).tolist()


def test_rows_that_another_dataset_learns_are_not_held_out(prepared):
    rows = {"new": {"train": texts("new", 9), "validation": texts("old", 3)}, "old": {"train": texts("old", 9)}}
    parts = [{"dataset": "new", "evaluation_split": "validation"}, {"dataset": "old"}]
    with pytest.raises(DataError, match="new holds out what is learned from old: 3 of 3 held-out rows"):
        prepared(rows, datasets=parts)
    rows["new"]["validation"] += texts("other", 1)
    assert len(prepared(rows, datasets=parts).evaluation) == 1
    assert "new holds out what is learned from old: 3 of 4 held-out rows are among" in " ".join(prepared.warnings)


PAIRS = [{"prompt": f"{index}?", "chosen": f"{index}!", "rejected": "no"} for index in range(9)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "examples",
            r"new and old cannot be mixed: new has examples \(`text`\), from which this method learns, and old has "
            r"preference pairs \(`preference`\): `method: dpo` learns",
        ),
        (
            "pairs",
            r"old and new cannot be mixed: old has preference pairs .* new has examples .*: `method: sft`",
        ),
    ],
)
def test_rows_that_no_method_learns_from_together_are_named(prepared, kind, message):
    rows = {"new": {"train": texts("new", 9)}, "old": {"train": PAIRS}}
    with pytest.raises(DataError, match=message):
        prepared(rows, kind, datasets=[{"dataset": "new"}, {"dataset": "old"}])


def test_formats_that_the_recipe_states_are_refused_with_it():
    parts = [{"dataset": "new", "format": "messages"}, {"dataset": "old", "format": "labelled"}]
    with pytest.raises(
        ValidationError, match=r"`method: sft`: new and old cannot be mixed: .*old has labelled answers .*`method: kto`"
    ):
        make_config("sft", data={"datasets": parts, "sequence_length": 64})


def test_the_check_of_inputs_names_what_cannot_be_mixed(tmp_path, tokenizer_folder):
    inputs = {"base": tmp_path / "base"}
    inputs["base"].mkdir()
    (inputs["base"] / "model").symlink_to(tokenizer_folder)
    for name, rows in (("new", texts("new", 3)), ("old", PAIRS)):
        inputs[name] = tmp_path / name
        (inputs[name] / "data").mkdir(parents=True)
        (inputs[name] / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = make_config("dpo", model="base", data={"datasets": [{"dataset": "new"}, {"dataset": "old"}]})
    stage_input = StageInput(
        name="dpo",
        kind="train",
        version="0" * 12,
        config=config.model_dump(mode="json"),
        inputs=inputs,
        cache=tmp_path / "cache",
    )
    ((field, error),) = check(stage_input)
    assert (field, type(error)) == ("data.datasets", DataError)
    assert "old and new cannot be mixed" in str(error)


def test_errors_say_of_which_dataset_they_are(prepared):
    rows = {"new": {"train": texts("new", 4)}, "old": {"train": [*alpaca(2), {"instruction": 3, "output": ""}]}}
    with pytest.raises(DataError, match=r"^old: 1 of 3 rows cannot be learned from"):
        prepared(rows, datasets=[{"dataset": "new"}, {"dataset": "old"}])


def test_warnings_say_of_which_dataset_they_are(prepared):
    rows = {"new": {"train": texts("new", 4) * 2}, "old": {"train": texts("old", 4)}}
    prepared(rows, datasets=[{"dataset": "new"}, {"dataset": "old"}])
    (repeated,) = (warning for warning in prepared.warnings if "repeat" in warning)
    assert repeated.startswith("new: training data: 4 of 8 rows repeat")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"dataset": "a", "datasets": [{"dataset": "b"}]}, "has `dataset: a` and `datasets`"),
        ({"datasets": [{"dataset": "a"}, {"dataset": "a", "split": "train"}]}, "same split of the same dataset twice"),
        ({"datasets": [{"dataset": "a", "weight": 0}]}, "greater than 0"),
        ({"datasets": [{"dataset": "a", "weight": -1}]}, "greater than 0"),
        ({"datasets": [{"dataset": "a", "weight": float("nan")}]}, "finite number"),
        ({"datasets": [{"dataset": "a", "weight": 1}, {"dataset": "b"}]}, "b has no `weight`"),
        (
            {"datasets": [{"dataset": "a", "weight": 1}], "mixing": {"strategy": "concat"}},
            "whatever `weight` says; remove the weights",
        ),
        ({"packing": "cut", "format": "text", "datasets": [{"dataset": "a", "format": "alpaca"}]}, "datasets.0.format"),
        ({"datasets": [{"dataset": "a", "evaluation_split": "train"}]}, "`datasets.0.evaluation_split` is `train`"),
    ],
)
def test_what_cannot_be_meant_is_refused(data, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**data)


def test_the_same_dataset_under_two_names_is_refused_and_other_splits_of_it_are_not():
    copies = {name: DownloadConfig(kind="download", dataset="builtin/addition") for name in ("a", "b")}
    stages = {**copies, "c": DownloadConfig(kind="download", dataset="file://c.jsonl")}
    (problem,) = DataConfig(datasets=[{"dataset": name} for name in stages]).problems_among(stages)
    assert problem.startswith("data.datasets: a and b are the same dataset")
    assert not [*DataConfig(datasets=[{"dataset": "a"}, {"dataset": "c"}]).problems_among(stages)]
    assert not [*DataConfig(datasets=[{"dataset": "a"}, {"dataset": "b", "split": "more"}]).problems_among(stages)]


def test_a_copy_of_a_dataset_is_refused(prepared):
    for copy in (texts("new", 9), texts("new", 9)[::-1]):
        rows = {"new": {"train": texts("new", 9)}, "old": {"train": copy}}
        with pytest.raises(DataError, match="new and old have the same rows, which would be there twice"):
            prepared(rows, datasets=[{"dataset": "new"}, {"dataset": "old"}])


def test_two_splits_of_a_dataset_have_names_of_their_own():
    config = DataConfig(datasets=[{"dataset": "a"}, {"dataset": "a", "split": "more"}, {"dataset": "b"}])
    assert config.names == ["a.train", "a.more", "b"]
