"""Evaluation by EvalScope: by night with a real server (`make evalscope`), else with its recorded files."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.core.contract import StageContext, StageResult
from stages.core.errors import EvaluationError, ResourceError
from stages.harnesses.evalscope.running import SUBSET_SIZE, read_results
from stages.harnesses.harness import Evaluation
from stages.harnesses.installation import EVALSCOPE
from stages.harnesses.registry import HARNESSES
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.evaluate.run import run
from stages.kinds.promote.paired import compare
from tests.serving import make_model
from tests.tiny_engine import TinyEngine

ROWS = [
    {"prompt": "What is 1 + 2?", "answer": "3"},
    {"messages": [{"role": "user", "content": "What is 20 + 22?"}], "answer": 42},
    {"prompt": "What is 2 + 2?", "answer": "5"},
]


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "sets"


def config(sets: Path, **said: Any) -> EvaluateConfig:
    tree = {"kind": "evaluate", "model": "sft", "harness": "evalscope", "tasks": ["sums"], "task_folder": str(sets)}
    return EvaluateConfig.model_validate({**tree, "generation": {"max_tokens": 8, "stop": ["\n"]}, **said})


@pytest.fixture
def evaluated(tiny_engine: TinyEngine, sets: Path, tmp_path: Path) -> Iterator[Any]:
    make_model(tmp_path / "sft" / "model")
    handler = signal.getsignal(signal.SIGTERM)

    def evaluated(name: str = "work", **said: Any) -> tuple[StageResult, Path]:
        work = tmp_path / name
        work.mkdir(exist_ok=True)
        context = StageContext(work, name, "0" * 12, {"sft": tmp_path / "sft"}, {}, tmp_path / "cache")
        return run(config(sets, **said), context), work

    yield evaluated
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.nightly
def test_its_scores_and_samples_are_those_of_any_harness(evaluated: Any) -> None:
    result, work = evaluated()
    assert result.metrics["sums.exact_match"] == pytest.approx(2 / 3)
    assert result.metrics["sums.exact_match_stderr"] == pytest.approx(1 / 3)  # s = 1 / √3, over √3
    assert result.tags["evalscope_version"] == EVALSCOPE.find().version
    rows = [json.loads(line) for line in (work / "samples" / "sums.jsonl").read_text().splitlines()]
    assert [(row["doc_id"], row["resps"], row["exact_match"]) for row in rows] == [
        (0, [["3"]], 1),
        (1, [["42"]], 1),
        (2, [["4"]], 0),
    ]
    _, fewer = evaluated("fewer", limit=2)
    [difference] = compare([work], [fewer])
    assert (difference.name, difference.num_samples, difference.num_unpaired) == ("sums.exact_match", 2, 1)
    key = next(line for line in (work / "scratch").rglob("request.json"))
    assert "api_key" not in key.read_text()


@pytest.mark.nightly
def test_what_it_cannot_do_is_said_before_a_server_starts(evaluated: Any, sets: Path, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"has a task 'gsm9k'; did you mean gsm8k"):
        evaluated(tasks=["gsm9k"])
    (sets / "open.jsonl").write_text('{"prompt": "Why?", "answer": "so"}\n{"prompt": "Who?"}\n')
    with pytest.raises(EvaluationError, match="reading the questions of open: question 2 has no right answer"):
        evaluated(tasks=["open"])
    assert not (tmp_path / "work" / "server.log").exists()


@pytest.mark.nightly
def test_a_benchmark_that_fails_is_an_error_with_its_last_words(evaluated: Any, tmp_path: Path) -> None:
    with pytest.raises(
        EvaluationError, match=r"could not run ifeval: .* ended with exit code 1: .*few.shot.*; everything"
    ):
        evaluated(num_fewshot=10_000, tasks=["ifeval"])


def test_without_its_environment_the_recipe_says_how_to_make_one(
    monkeypatch: pytest.MonkeyPatch, sets: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv(EVALSCOPE.variable, str(tmp_path / "python"))
    with pytest.raises(
        ResourceError, match=r"EvalScope was not found: .* create its environment with `make evalscope`"
    ):
        config(sets).resolve_outside()


def test_a_model_that_is_asked_in_plain_text_is_refused(sets: Path, tmp_path: Path) -> None:
    context = StageContext(tmp_path, "scores", "0" * 12, {}, {}, tmp_path)
    evaluation = config(sets, apply_chat_template=False).evaluation
    with pytest.raises(EvaluationError, match="asks as a user of a chat, but the model is asked in plain text"):
        HARNESSES["evalscope"].evaluate(evaluation, context, lambda: pytest.fail("no server is awaited"))


def write_review(folder: Path, subset: str, index: int, value: dict[str, float], status: str = "success") -> None:
    """Write a line of EvalScope 1.14.1's review file, with only the fields that we read."""
    (folder / "reviews" / "tiny").mkdir(parents=True, exist_ok=True)
    asked = {"role": "user", "content": f"{subset} {index}?", "source": None}
    said = {"role": "assistant", "content": "x", "source": "generate"}
    score = {"value": value, "status": status, "prediction": "x", "extracted_prediction": "x"}
    score["metadata"] = {} if value else {"acc": "error: no such thing"}
    line = {"index": index, "target": ["x"], "messages": [asked, said], "sample_score": {"score": score}}
    with (folder / "reviews" / "tiny" / f"mmlu_{subset}.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def write_report(folder: Path, *metrics: tuple[str, str, float, str]) -> None:
    (folder / "reports" / "tiny").mkdir(parents=True)
    found = [
        {"identity": {"name": name, "aggregation": how}, "score": score, "semantics": {"direction": direction}}
        for name, how, score, direction in metrics
    ]
    (folder / "reports" / "tiny" / "mmlu.json").write_text(json.dumps({"metrics": found}))


EVALUATION = Evaluation("evalscope", ("mmlu",), None, None, None, True, None, False, 1)


def test_samples_of_several_subsets_keep_their_numbers(tmp_path: Path) -> None:
    for subset, index, right in (("anatomy", 1, 0.0), ("anatomy", 0, 1.0), ("virology", 0, 1.0)):
        write_review(tmp_path, subset, index, {"acc": right})
    write_report(tmp_path, ("acc", "mean", 0.75, "higher_is_better"), ("rank", "median", 3.0, "lower_is_better"))
    results = read_results({"mmlu": tmp_path}, EVALUATION)
    assert [row["doc_id"] for row in results.samples["mmlu"]] == [0, 1, SUBSET_SIZE]
    assert results.scores["results"]["mmlu"] == {
        "acc,none": pytest.approx(2 / 3),
        "acc_stderr,none": pytest.approx(1 / 3),
        "rank_median,none": 3.0,
    }
    assert results.scores["higher_is_better"]["mmlu"] == {"acc": True, "rank_median": False}
    assert len({row["prompt_hash"] for row in results.samples["mmlu"]}) == 3


def test_a_sample_whose_metric_failed_is_no_zero_but_an_error(tmp_path: Path) -> None:
    write_review(tmp_path, "anatomy", 0, {"acc": 1.0})
    write_review(tmp_path, "anatomy", 1, {}, status="excluded")
    write_report(tmp_path, ("acc", "mean", 1.0, "higher_is_better"))
    with pytest.raises(
        EvaluationError, match=r"could not score sample 1 of mmlu \(excluded\): acc: error: no such thing"
    ):
        read_results({"mmlu": tmp_path}, EVALUATION)


def test_gates_on_its_scores_are_checked_by_name(sets: Path) -> None:
    harness = HARNESSES["evalscope"]
    evaluation = config(sets, tasks=["sums", "gsm8k"]).evaluation
    scores = ("sums.exact_match", "sums.acc", "gsm8k.acc", "x.acc")
    assert [harness.may_give(score, evaluation) for score in scores] == [True, False, True, False]


def test_fields_of_other_harnesses_do_nothing_beside_it(sets: Path) -> None:
    idle = dict(config(sets).idle_fields())
    assert idle["judge"] == "the harness is evalscope: no judge is asked"
