"""A report shows everything that was recorded of a pipeline run, and marks missing figures as unknown."""

import json
import re
import sys
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest

from flows.ledger.record import StageEntry
from flows.report.answers import MOST_EPISODES
from flows.report.page import layouts_page, page
from flows.report.reading import read_report
from flows.report.sentences import warnings_of
from flows.store.content import RECORD_FILE
from stages.data.summaries import LENGTHS_FILE
from stages.rollouts.episode_table import EPISODES_FILE, round_file, write_episodes
from tests.episodes import episode
from tests.unit.flows.report.conftest import HOSTILE, LENGTHS, METRICS, PAIRED, STAGES, VERDICT


@pytest.fixture
def read(store):
    return lambda record: read_report(record, store.index())


def test_every_stage_has_its_state_its_inputs_and_its_metrics(night, read):
    report = read(night.refresh())
    stages = {one.name: one for one in report.stages}
    assert list(stages) == list(STAGES)
    assert {one.state for one in report.stages} == {"built"}
    assert stages["promote"].upstream == ("sft", "scores", "serve")
    assert {name: one.metrics for name, one in stages.items() if one.metrics} == METRICS
    assert {one.built_by for one in report.stages} == {None}


def test_what_is_reused_names_the_refresh_that_built_it(night, read):
    night.refresh()
    report = read(night.refresh())
    stages = {one.name: one for one in report.stages}
    assert (stages["base"].state, stages["base"].built_by) == ("cached", "nightly-1")
    assert "built" in stages["base"].reason
    assert (stages["sft"].state, stages["sft"].built_by) == ("built", None)
    assert "learning_rate" in stages["sft"].reason
    assert {one.stage for one in report.spans} == {"sft", "serve", "scores", "promote"}


def test_earlier_champions_are_behind_the_curve_and_what_is_no_number_is_a_gap(night, read):
    night.refresh()
    night.refresh()
    [training] = read(night.refresh()).trainings
    own, *earlier = training.curves
    assert (own.name, own.behind, own.steps) == ("loss", False, (1, 2, 3, 4))
    assert own.values == (1.0, pytest.approx(2 / 3), None, pytest.approx(0.5 / 3))
    assert [one.behind for one in earlier] == [True, True]
    assert [one.values[0] for one in earlier] == [1.5, 3.0]  # the latest first
    assert all("champion of" in one.name for one in earlier)


def test_a_report_reads_no_records_but_those_of_its_own_artifacts_and_of_champions(night, read):
    """A report takes hardly longer after a year of nightly refreshes, which leave a thousand other artifacts."""
    nights = [night.refresh() for _ in range(6)]
    opened, is_listening = set(), True

    def listen(event, arguments):
        if is_listening and event == "open" and str(arguments[0]).endswith(RECORD_FILE):
            opened.add(Path(arguments[0]).parent)

    sys.addaudithook(listen)
    read(nights[-1])
    is_listening = False
    promotions = {record.stages["promote"].artifact for record in nights}
    shown = {entry.artifact for record in nights[-4:] for entry in record.stages.values()}
    assert promotions < opened <= promotions | shown


def test_what_a_method_measures_beside_its_loss_has_charts_of_its_own(night, read):
    record = night.refresh()
    measured = {"loss": 0.6, "reward_margin": 0.1, "reward_chosen": 0.2, "preference_accuracy": 0.5, "grad_norm": 1.0}
    held_out = {"evaluation_loss": 0.5, "evaluation_preference_accuracy": 0.75}
    rows = [{"step": 1, "time_ms": 1, **measured}, {"step": 2, "time_ms": 2, **measured, **held_out}]
    file = record.stages["sft"].artifact / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = {one.title: [curve.name for curve in one.curves] for one in read(record).trainings}
    assert charts == {
        "sft": ["loss", "evaluation_loss"],
        "sft: reward": ["reward_margin", "reward_chosen"],
        "sft: preference accuracy": ["preference_accuracy", "evaluation_preference_accuracy"],
    }


def test_a_comparison_in_which_nothing_was_solved_says_so(night, read):
    record = night.refresh()
    unsolved = replace(PAIRED, candidate=0.0, reference=0.0, difference=0.0, standard_error=0.0)
    verdict = VERDICT.model_copy(update={"differences": (unsolved,)})
    (record.stages["promote"].artifact / "verdict.json").write_text(verdict.model_dump_json())
    means = read(record).means
    assert "neither solved any of 500 samples, so nothing says which is better" in means
    assert "95% interval" not in means


def test_a_training_says_what_it_has_learned_from(night, read):
    record = night.refresh()
    [found] = read(record).learned_from
    assert {one.dataset: (one.bin_tokens, one.counts) for one in found.lengths} == {
        name: (16, counts) for name, counts in LENGTHS.counts.items()
    }
    assert [one.model_dump() for one in found.shares] == [
        {"dataset": "old", "asked": 0.25, "seen": 0.26},
        {"dataset": "new", "asked": 0.75, "seen": None},
    ]
    (record.stages["sft"].artifact / LENGTHS_FILE).unlink()  # as trainings of before have none
    [found] = read(record).learned_from
    assert not found.lengths and len(found.shares) == 2


def test_a_verdict_has_its_gates_and_what_it_means(night, read):
    report = read(night.refresh())
    [promotion] = report.promotions
    gates, paired = promotion.tables
    assert gates[1] == ("sums.exact_match", "0.9375", "≥ 0.9", "yes", "")
    assert paired[1][5:7] == ("+0.0500", "0.0125")
    assert promotion.differences[0].model_dump() == {
        "name": "sums.exact_match",
        "difference": 0.05,
        "interval": pytest.approx((0.05 - 1.96 * 0.0125, 0.05 + 1.96 * 0.0125), abs=1e-5),
        "nothing_solved": None,
    }
    assert "new champion of adder" in report.means
    assert "+0.05 (95% interval +0.0255 to +0.0745: a clear difference)" in report.means


def test_a_verdict_of_before_gates_were_data_says_where_they_are(night, read):
    record = night.refresh()
    artifact = record.stages["promote"].artifact
    missed = ("size_mib 2.1 > 2, missed by 0.1",)
    old = VERDICT.model_copy(update={"missed": missed}).model_dump_json(exclude={"gates", "differences"})
    (artifact / "verdict.json").write_text(old)
    report = read(record)
    assert report.promotions[0].tables is None
    assert report.promotions[0].differences[0].difference == 0.05  # by the stage's metrics
    assert f"into <code>verdict.md</code> alone. Missed:</p>\n<ul><li>{escape(missed[0])}</li></ul>" in page(report)


def test_a_comparison_says_which_layout_is_the_fastest_and_what_its_trials_cost(comparison, read):
    report = read(comparison)
    assert report.happened.startswith("The comparison of layouts of sft completed after 70.0 s")
    assert report.means.startswith("The fastest layout is megatron tp=2")
    assert report.means.endswith(": 150 tokens/s.")
    assert read(replace(comparison, measured={}, trials=())).means == "No layout was measured."
    assert report.cost.device_hours == pytest.approx(1 + 2 + 7 * 2 * 10 / 3600)


def test_a_page_of_layouts_without_a_refresh_needs_nothing_from_elsewhere_and_escapes_text(make_row):
    found = layouts_page("<title>", ["a & b"], [make_row(100.0), make_row(0.0, text="<layout>", error="1 < 2")])
    assert not re.search(r"<(script|link|img)\b", found)
    assert '<meta name="viewport" content="width=device-width' in found
    for text in ("<title>&lt;title&gt;</title>", "a &amp; b", "<code>&lt;layout&gt;</code>: 1 &lt; 2", "100 tokens/s"):
        assert text in found


def test_a_failure_comes_with_its_log_and_what_it_means(night, read):
    report = read(night.refresh(failing="sft"))
    stages = {one.name: one for one in report.stages}
    assert (stages["sft"].state, stages["sft"].error, stages["serve"].state) == ("failed", HOSTILE, "skipped")
    assert stages["sft"].log_tail == ("it began", HOSTILE, "it ended")
    assert report.means == "There is no new model: sft failed, so what stands on that was not built."


def test_the_points_of_many_curves_are_fewer_of_each(night, read, monkeypatch):
    whole = read(night.refresh()).trainings
    monkeypatch.setattr("flows.report.trainings.MOST_POINTS_OF_PAGE", 2)
    monkeypatch.setattr("flows.report.trainings.FEWEST_POINTS", 1)
    [training] = read(night.refresh()).trainings
    assert len(training.curves) == 2
    for curve in training.curves:
        assert (curve.steps, curve.every) == ((1, 4), 4)
        assert curve.values[-1] is not None
    assert whole[0].curves[0].every == 1


def test_what_has_not_begun_is_not_said_to_have_been_there(night, read):
    first = night.refresh()
    running = read(replace(first, attempts={}, state="running", stages=dict.fromkeys(STAGES, StageEntry("train", "0"))))
    shown = page(running)
    assert "No stage was started.</p>" in shown
    assert "what was wanted was there already" not in shown


def test_nothing_new_is_said(night, read):
    night.refresh(rate=1e-3)
    report = read(night.refresh(rate=1e-3))
    assert report.spans == ()
    assert report.happened.endswith("of 7 stages: 7 cached.")


def test_the_price_is_that_of_the_hardware_file(night, read, tmp_path):
    record = night.refresh(devices=4)
    assert read(record).cost.price is None
    (tmp_path / "hardware.yaml").write_text("like: h200\nprice_per_device_hour: 2.5\n")
    cost = read(record).cost
    assert cost.device_hours == pytest.approx(7 * 4 * 10 / 3600)
    assert cost.price == pytest.approx(2.5 * 7 * 4 * 10 / 3600)


@pytest.mark.parametrize(
    "damaged",
    [b"like: [h200", b"like: 3", b"\xff\xfe", b"price_per_device_hour: -1", b"- x", b"software: 3", b"[" * 9999],
)
def test_a_damaged_hardware_file_costs_a_report_its_price_alone(night, read, tmp_path, damaged):
    record = night.refresh(devices=4)
    (tmp_path / "hardware.yaml").write_bytes(damaged)
    report = read(record)
    assert report.cost.price is None
    assert report.cost.device_hours > 0
    assert str(tmp_path / "hardware.yaml") in report.cost.damage


def test_energy_is_the_sum_of_what_was_counted_or_unknown(night, read):
    assert read(night.refresh()).cost.energy_kwh is None
    assert read(night.refresh(energy_j=900_000.0)).cost.energy_kwh == pytest.approx(4 * 0.25)


def test_attempts_of_unknown_devices_are_not_counted_as_none(night, read):
    cost = read(night.refresh(devices=None)).cost
    assert (cost.device_hours, len(cost.unknown)) == (0.0, len(STAGES))


def write_samples(record, stage, answers, **changes):
    folder = record.stages[stage].artifact / "samples"
    folder.mkdir(exist_ok=True)
    rows = [
        {
            "doc_id": number,
            "doc_hash": f"hash {number}",
            "arguments": [[f"examples {'of ' * 500}What is {number} + 1?", {}]],
            "resps": [[answer]],
            "target": str(number + 1),
            "metrics": ["exact_match"],
            "exact_match": float(answer == str(number + 1)),
            **changes,
        }
        for number, answer in enumerate(answers)
        for _ in range(2)  # a row for each filter
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def test_the_same_ten_questions_are_answered_by_the_base_and_by_the_candidate(night, read):
    record = night.refresh()
    write_samples(record, "scores", [str(number + 1) for number in range(30)])
    write_samples(record, "scores-base", [f"{HOSTILE}\x1b[2J {number}" for number in range(20)])
    [found] = read(record).answers

    assert found.stages == ("scores-base", "scores")
    assert [one.number for one in found.questions] == [str(number) for number in range(10)]
    assert found.questions[4].asked.endswith("of What is 4 + 1?") and found.questions[4].asked.startswith("… ")
    assert found.questions[4].expected == "5"
    base, candidate = found.questions[4].answers
    assert (base.text, base.scores) == (f"{HOSTILE}\\x1b[2J 4", "exact_match 0")
    assert (candidate.text, candidate.scores) == ("5", "exact_match 1")
    shown = page(read(record))
    assert f"{escape(HOSTILE)}\\x1b[2J 4" in shown and HOSTILE not in shown


def test_answers_that_changed_since_the_champion_come_first_then_wrong_and_right_ones(night, read, tmp_path):
    record = night.refresh()
    right = [str(number + 1) for number in range(8)]
    write_samples(record, "scores-base", ["no"] * 8)
    candidate = write_samples(record, "scores", [*right[:2], "no", *right[3:5], "no", right[6], "no"])
    # The judge's samples name no metrics; the champion answered 0 to 5 right.
    (champion := tmp_path / "champion" / "samples").mkdir(parents=True)
    rows = [{**row, "metrics": [], "exact_match": float(int(row["doc_id"]) < 6)} for row in candidate]
    (champion / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = {"higher_is_better": {"sums": {"exact_match": True, "said": True}}}
    (champion.parent / "scores.json").write_text(json.dumps(known))
    standing = {"version": "3", "same_model": False, "evaluations": [str(champion.parent)]}
    (record.stages["promote"].artifact / "champion.json").write_text(json.dumps({"champion": standing}))

    [found] = read(record).answers
    assert found.stages == ("champion (version 3)", "scores-base", "scores")
    assert [one.number for one in found.questions] == ["2", "6", "5", "7", "0", "1", "3", "4"]
    assert [one.change for one in found.questions[:3]] == [
        f"{change} than champion (version 3)" for change in ("worse", "better", "worse")
    ]
    assert {one.change for one in found.questions[3:]} == {""}
    assert [one.scores for one in found.questions[0].answers] == [f"exact_match {value}" for value in (1, 0, 0)]
    summary = "Of 8 questions, scores answered 1 better than champion (version 3), 2 worse, and 5 equally well."
    assert found.summary == summary and summary in page(read(record))


def test_answers_of_a_choice_are_their_texts(night, read):
    record = night.refresh()
    choice = {"arguments": [["2 + 2 is", " 4"], ["2 + 2 is", " 5"]], "target": "0"}
    write_samples(record, "scores", ["-"], **choice, resps=[[[-3.0, False]], [[-1.0, True]]])
    [question] = read(record).answers[0].questions

    assert (question.asked, question.expected) == ("2 + 2 is", "4")
    assert [one.text for one in question.answers] == ["5"]


def test_questions_that_only_some_were_asked_are_the_last_model_s(night, read):
    record = night.refresh()
    write_samples(record, "scores", ["1", "2"])
    write_samples(record, "scores-base", ["1"], doc_hash="another text")
    [found] = read(record).answers

    assert [[one and one.text for one in question.answers] for question in found.questions] == [
        [None, "1"],
        [None, "2"],
    ]
    assert "not asked" in page(read(record))


def test_a_training_and_no_evaluation_shows_episodes_of_its_first_and_last_rounds(night, read):
    record = night.refresh()
    folders = {name: record.stages[name].artifact for name in ("sft", "scores")}
    write_episodes(folders["scores"] / EPISODES_FILE, [episode()])  # its transcripts are among the answers
    for step in (1, 5, 9):
        file = round_file(folders["sft"], step)
        file.parent.mkdir(exist_ok=True)
        write_episodes(file, [episode(step=step, sample=sample) for sample in range(8)])
    report = read(record)
    [found] = report.episodes
    assert found.stage == "sft"
    assert [one.step for one in found.episodes] == [1] * MOST_EPISODES + [9] * MOST_EPISODES
    first = found.episodes[0]
    assert (first.asked, first.transcript, first.expected) == ("What is 2 + 2?", "called, and said 4", "4")
    assert first.rewards == "right 1, total 0.5"
    shown = page(report)
    assert shown.count("called, and said 4") == 2 * MOST_EPISODES and 'href="#episodes"' in shown
    file.write_bytes(b"no Parquet")
    assert read(record).episodes == ()


def test_without_samples_no_answers_are_shown(night, read):
    report = read(night.refresh())

    assert report.answers == ()
    assert "No evaluation of this refresh has samples in the store." in page(report)


def test_a_slow_stage_an_unusual_score_and_a_data_set_that_shrank_are_warned_of(night, monkeypatch):
    """Six usual nights, one with fewer tokens/s, a lower score and fewer rows, and one on other devices."""

    def warned(number, rate, score, rows, devices=2):
        monkeypatch.setitem(METRICS["sft"], "tokens_per_s", rate)
        monkeypatch.setitem(METRICS["scores"], "sums.exact_match", score)
        monkeypatch.setitem(METRICS["rows"], "num_rows", rows)
        return warnings_of(night.refresh(devices=devices, revision=f"v{number}"))

    for number, rate in enumerate((90.0, 100.0, 110.0, 1000.0, 100.0)):
        assert warned(number, rate, 0.9 + number / 100, 1000.0) == []
    assert warned(5, 68.0, 0.95, 901.0) == []
    assert set(warned(6, 60.0, 0.5, 700.0)) == {
        "rows: the data set shrank from 901 to 700 rows; look whether its source is whole",
        "sft: 60 tokens/s; the last 6 attempts on the same hardware and layout had a median of 100; look for other "
        "programs, heat, or a slower disk or network",
        "scores: sums.exact_match is 0.5, and was 0.9 to 0.95 in the last 6 evaluations; look at the samples "
        "(`lifecycle show STAGE --samples`) and at what changed",
    }
    assert warned(7, 10.0, 0.9, 700.0, devices=4) == []
