"""Mistakes in lm-eval tasks are found before training, without a server, and reported with task and field."""

import json
import re
from pathlib import Path

import pytest

from stages.core.contract import StageInput
from stages.core.errors import EvaluationError, LifecycleError
from stages.kinds.evaluate.check import check
from tests.serving import make_model

GENERATED = """
task: own
dataset_path: json
dataset_kwargs: {data_files: {train: train.jsonl, test: test.jsonl}}
fewshot_split: train
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOSEN = GENERATED.replace("generate_until", "multiple_choice").replace("exact_match", "acc") + "doc_to_choice: words\n"
COMPARED = GENERATED.replace("generate_until", "loglikelihood").replace("exact_match", "acc")
SUMMED = GENERATED.replace("generate_until", "loglikelihood_rolling").replace(
    "metric: exact_match, aggregation: mean", "metric: bits_per_byte, aggregation: bits_per_byte"
)
SCORES = "def score(row, answers):\n    return {'exact_match': row['answer'] == answers[0]}\n"


def findings(
    folder: Path, task: str, code: str | None = None, **fields: object
) -> list[tuple[str, LifecycleError | str]]:
    """Return the problems found in an lm-eval task file before training. fields: of the evaluate stage's config."""
    tasks = folder / "tasks"
    tasks.mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{split} {n}", "answer": "1", "number": 1, "words": ["a", "1"]} for n in range(5)]
        (tasks / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "cut.jsonl").write_text('{"question": ')
    (tasks / "own.yaml").write_text(task)
    if code:
        (tasks / "own.py").write_text(code)
    (folder / "base" / "model").mkdir(parents=True, exist_ok=True)
    config = {"kind": "evaluate", "model": "base", "tasks": ["own"], "task_folder": str(tasks), **fields}
    inputs, cache = {"base": folder / "base"}, folder / "cache"
    return [*check(StageInput(name="s", kind="evaluate", version="0" * 12, config=config, inputs=inputs, cache=cache))]


@pytest.mark.parametrize(
    "task", [GENERATED, CHOSEN, COMPARED, SUMMED], ids=["generated", "chosen", "compared", "summed"]
)
def test_a_sound_task_passes_with_examples_and_without(tmp_path: Path, task: str) -> None:
    shots = {} if task is SUMMED else {"num_fewshot": 2}
    assert findings(tmp_path, task, **shots) == []


@pytest.mark.parametrize(
    ("task", "old", "new", "message"),
    [
        (
            GENERATED,
            "{{question}}",
            "{{questoin}}",
            "the task own, in `doc_to_text`: .*'questoin' is undefined.*question",
        ),
        (GENERATED, "{{answer}}", "{{anwser}}", "in `doc_to_target`: .*'anwser' is undefined"),
        (CHOSEN, "doc_to_choice: words", 'doc_to_choice: "{{wrods}}"', "in `doc_to_choice`: .*'wrods' is undefined"),
        (GENERATED, "test_split: test", "test_split: tset", "in `test_split`: KeyError: 'tset' .*the split test with"),
        (GENERATED, "fewshot_split: train", "fewshot_split: trian", "in `fewshot_split`: KeyError: 'trian'"),
        (GENERATED, "test: test.jsonl", "test: tset.jsonl", "tset.jsonl, which does not exist"),
        (GENERATED, "test: test.jsonl", "test: cut.jsonl", "the task own: .*JSON parse error"),
        (GENERATED, "metric: exact_match", "metric: exact_mach", "metric 'exact_mach', .* did you mean exact_match?"),
        (CHOSEN, "metric: acc", "metric: exact_mach", "metric 'exact_mach'"),  # lm-eval gives no score for it
        (GENERATED, "aggregation: mean", "aggregation: maen", "the `aggregation` of its metric exact_match"),
        (GENERATED, "generate_until", "generate", "invalid output_type 'generate'"),
        (GENERATED, "doc_to_text", "doc_to_txt", "unexpected keyword argument 'doc_to_txt'"),
        (GENERATED, "test_split: test", "test_split: [", "no readable YAML"),
        (GENERATED, "max_gen_toks: 4", "max_gen_toks: four", "generation_kwargs.max_gen_toks: found 'four'"),
        (GENERATED, '["."]', "[5]", re.escape("generation_kwargs.until: found '[5]'")),
        (COMPARED, '"{{answer}}"', "number", "the task own asks with '1', expected a text"),
        (GENERATED, '"{{question}}"', '"{{question}"', "in `doc_to_text`: TemplateSyntaxError"),
        (GENERATED, "test_split: test", "test_split: test\nnum_fewshot: 9", "Sample larger than population"),
    ],
)
def test_a_mistake_in_a_task_is_named_before_there_is_a_server(
    tmp_path: Path, task: str, old: str, new: str, message: str
) -> None:
    assert old in task
    [(field, error)] = findings(tmp_path, task.replace(old, new, 1))

    assert field == "tasks"
    assert isinstance(error, EvaluationError)
    assert re.search(message, str(error))


@pytest.mark.parametrize(
    ("column", "named"), [("answer", None), ("anwser", "in `process_results`: KeyError: 'anwser'")]
)
def test_code_that_scores_is_tried_with_a_made_up_answer(tmp_path: Path, column: str, named: str | None) -> None:
    task = f"{GENERATED}process_results: !function own.score\n"
    found = findings(tmp_path, task, SCORES.replace("answer'", f"{column}'"), trust_task_code=True)

    assert bool(found) == bool(named)
    assert not named or named in str(found[0][1])


def test_prompts_are_rendered_by_the_template_of_the_model(tmp_path: Path) -> None:
    make_model(tmp_path / "base" / "model")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}{{ messages }}"
    (tmp_path / "base" / "model" / "chat_template.jinja").write_text(refuses)
    [(field, error)] = findings(tmp_path, f"{GENERATED}description: Add.\n", apply_chat_template=True)

    assert (field, type(error)) == ("tasks", EvaluationError)
    assert "no system prompt" in str(error)
