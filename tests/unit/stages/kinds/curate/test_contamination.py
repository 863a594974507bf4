"""The contamination check finds every planted overlap of training rows with benchmark questions, and nothing else."""

import json
import random
import shutil
from pathlib import Path

import pytest

from flows.recipe.recipe import load_stages
from flows.recipe.version import identity_of, version_of
from stages.core.errors import DataError, EvaluationError, RecipeError
from stages.data.any_rows import AnyRowReader
from stages.harnesses.harness import TaskItem
from stages.kinds.curate.config import Decontaminate
from stages.kinds.curate.contamination import Benchmarks
from tests.planted_rows import text, with_overlap
from tests.unit.stages.kinds.curate.curating import curate

CONFIGS = Path(__file__).parents[5] / "configs"
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{options}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
CHOICE = {
    "passage": "The lighthouse at the cape was built of grey stone by two brothers who never spoke to one another",
    "question": "Who built the lighthouse?",
    "options": ["Two brothers of few words who had come from the mainland", "All of the above"],
    "right": 0,
}


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def reason(row, questions, texts=(), number=0, **config):
    items = [TaskItem("sums", number, tuple(questions), tuple(texts))]
    return Benchmarks(Decontaminate(**config), items).reason(AnyRowReader().read(row))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Provide a folder with three evaluation tasks: the quickstart's short questions, long questions, and choices."""
    folder = tmp_path_factory.mktemp("tasks")
    draw = random.Random(0)
    for file in ("addition.yaml", "addition.jsonl"):
        shutil.copyfile(CONFIGS / "tasks" / file, folder / file)
    long = (folder / "addition.yaml").read_text().replace("addition", "long")
    (folder / "long.yaml").write_text(long)
    questions = [json.dumps({"question": f"{text(draw, 60)}?", "answer": text(draw, 30)}) for _ in range(60)]
    (folder / "long.jsonl").write_text("\n".join(questions))
    (folder / "choices.yaml").write_text(CHOICES)
    (folder / "choices.jsonl").write_text(json.dumps(CHOICE))
    return folder


def test_all_planted_overlaps_with_real_tasks_are_found_and_nothing_in_clean_rows(tmp_path, tasks):
    draw = random.Random(1)
    samples = [json.loads(line) for line in (tasks / "long.jsonl").read_text().splitlines()]
    clean = [chat("Tell me a story.", text(draw)) for _ in range(300)]
    clean += [chat("What is 12 + 345?", "357"), chat("All of the above", "Yes."), chat("Why?", "All of the above")]
    planted = [
        chat("Tell me a story.", with_overlap(draw, text(draw), sample[field], 13 + number % 15))
        for number, sample in enumerate(samples)
        for field in ("question", "answer")
    ]
    planted += [
        chat("what is 98 + 38", "136"),
        chat("Hello", f"There is a stone: {CHOICE['passage']}, they say."),
        chat("Who built the lighthouse?", "Two."),
        chat("Hello", f"I know: {CHOICE['options'][0]}."),
    ]
    rows = [*clean, *planted]
    draw.shuffle(rows)
    benchmarks = {"mine": {"tasks": ["long", "addition", "choices"], "task_folder": str(tasks)}}
    found = curate(tmp_path, rows, decontaminate={"benchmarks": benchmarks})
    assert found.rows == [row for row in rows if row in clean]
    assert len(found.dropped) == len(planted)
    reasons = "\n".join(row["reason"] for row in found.dropped)
    assert "asks what sample 0 of addition asks: “what is 98 + 38”" in reasons
    assert all(f"words with sample {number} of long: “" in reasons for number in range(60))


def test_twelve_words_of_a_long_sample_are_no_overlap_and_thirteen_are():
    sample = " ".join(f"w{number}" for number in range(40))
    words = sample.split()
    twelve, thirteen = ({"text": f"a {' '.join(words[5 : 5 + number])} b"} for number in (12, 13))
    assert reason(twelve, [sample]) is None
    assert reason(thirteen, [sample]) == f"shares 1 runs of 13 words with sample 0 of sums: “{' '.join(words[5:18])}”"
    assert reason(twelve, [sample], words=12)
    assert reason(thirteen, [sample], min_shared=2) is None


def test_how_words_are_written_hides_no_overlap():
    sample = (
        "Über den Wolken, muss die Freiheit wohl grenzenlos sein; alle Ängste, alle Sorgen bleiben darunter verborgen"
    )
    assert reason({"text": sample.upper().replace(",", " -")}, [sample])


def test_a_sample_of_ten_words_is_looked_for_as_a_whole_and_of_five_as_a_whole_text():
    ten, five = "how many ships were lost off the cape in winter", "what is two and two"
    assert "runs of 10 words" in reason({"text": f"They asked: {ten}?"}, [ten])
    assert reason({"text": f"They asked: {ten[:-7]}"}, [ten]) is None
    assert "asks what sample 0 of sums asks" in reason({"text": f"{five.capitalize()}?"}, [five])
    assert reason({"text": f"Now {five}?"}, [five]) is None


def test_words_that_most_samples_have_are_the_tasks_own():
    instruction = "Answer the following question with one of the letters A B C or D and nothing else please"
    items = [TaskItem("letters", number, (f"{instruction} question{number}",), ()) for number in range(20)]
    benchmarks = Benchmarks(Decontaminate(), items)
    assert benchmarks.reason(AnyRowReader().read({"text": f"{instruction} my own words"})) is None
    assert benchmarks.reason(AnyRowReader().read({"text": f"{instruction} question7"}))
    assert benchmarks.num_common == 6


def test_both_answers_of_a_pair_are_looked_at():
    sample = " ".join(f"w{number}" for number in range(13))
    pair = {"prompt": "Say.", "chosen": " Something.", "rejected": f" {sample}"}
    assert reason(pair, [sample])


def test_tasks_are_those_of_the_evaluations_and_names_of_stages_are_no_identity(tmp_path):
    (tmp_path / "tasks").mkdir()
    base = {"kind": "download", "model": "builtin/qwen3-1m"}
    mine = {"kind": "download", "dataset": "builtin/addition"}
    clean = {"kind": "curate", "datasets": ["mine"], "decontaminate": {}}
    scores = {"kind": "evaluate", "model": "base", "serving": {}, "task_folder": "tasks"}

    def curated(**evaluations):
        tree = {"base": base, "mine": mine, "clean": clean, **evaluations}
        return load_stages("mine", tmp_path, json.loads(json.dumps(tree))).stages["clean"]

    def version(config):
        return version_of(identity_of(config, {"mine": "a" * 12}, {}))

    config = curated(one={**scores, "tasks": ["b"]}, two={**scores, "tasks": ["a", "b"]})
    (benchmark,) = config.decontaminate.benchmarks.values()
    assert benchmark.tasks == ("a", "b")
    assert config.outside_paths() == {"decontaminate.benchmarks.1.task_folder": tmp_path / "tasks"}
    assert version(config) == version(curated(other={**scores, "tasks": ["b", "a"]}))
    assert version(config) != version(curated(one={**scores, "tasks": ["b"]}))
    with pytest.raises(RecipeError, match=r"clean\.decontaminate: the recipe has no `evaluate` stage"):
        curated()


def test_tasks_that_do_not_exist_or_are_empty_are_named(tmp_path, tasks):
    benchmarks = {"mine": {"tasks": ["lonf"], "task_folder": str(tasks)}}
    with pytest.raises(EvaluationError, match=r"a task 'lonf'; did you mean long"):
        curate(tmp_path, [chat("a", "b")], decontaminate={"benchmarks": benchmarks})


def test_a_dataset_that_is_a_benchmark_is_emptied_by_name(tmp_path, tasks):
    rows = [json.loads(line) for line in (tasks / "addition.jsonl").read_text().splitlines()]
    benchmarks = {"mine": {"tasks": ["addition"], "task_folder": str(tasks)}}
    with pytest.raises(DataError, match="`decontaminate` leaves nothing of the dataset: of 500 rows"):
        curate(
            tmp_path,
            [chat(row["question"], row["answer"]) for row in rows],
            decontaminate={"benchmarks": benchmarks},
        )
