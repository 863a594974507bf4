"""Score names of a task, read from its files, equal those of lm-eval itself."""

import pytest

from stages.harnesses.lm_eval.tasks import DEFAULT_METRICS, may_give

TASK = "task: sums\noutput_type: generate_until\n"
FILES = {
    "plain.yaml": TASK,
    "listed.yaml": "task: listed\nmetric_list: [{metric: bleu}, {metric: !function own.chars}]\n",
    "filtered.yaml": "include: base.inc\ntask: filtered\nfilter_list: [{name: strict}, {name: loose}]\n",
    "base.inc": "metric_list: [{metric: exact_match}]\n",
    "group.yaml": "group: both\ntask: [sums, listed]\n",
    "tagged.yaml": "task: tagged\ntag: mine\noutput_type: multiple_choice\n",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("tasks", "given", "not_given"),
    [
        (["sums"], ["sums.exact_match", "sums.exact_match_stderr"], ["sums.acc", "sum.exact_match", "sums"]),
        (["listed"], ["listed.bleu", "listed.chars"], ["listed.exact_match", "listed.own.chars"]),
        (["filtered"], ["filtered.strict.exact_match", "filtered.loose.exact_match"], ["filtered.exact_match"]),
        (["both"], ["both.anything", "sums.exact_match", "listed.bleu"], ["sums.bleu", "tagged.acc"]),
        (["mine"], ["tagged.acc", "tagged.acc_norm"], ["mine.acc", "tagged.exact_match"]),
        (["gsm8k"], ["gsm8k.strict-match.exact_match", "gsm8k.flexible-extract.exact_match"], ["gsm8k.exact_match"]),
        (["arc_easy"], ["arc_easy.acc", "arc_easy.acc_norm"], ["arc_easy.exact_match", "arc_challenge.acc"]),
        (["mmlu"], ["mmlu.acc", "mmlu_anatomy.acc"], ["gsm8k.strict-match.exact_match", "mmlu_anatomy.f1"]),
        (["no such task"], ["no such task.acc"], ["sums.acc"]),
    ],
)
def test_scores_of_tasks_groups_and_tags(folder, tasks, given, not_given):
    assert [score for score in given if not may_give(score, tasks, folder)] == []
    assert [score for score in not_given if may_give(score, tasks, folder)] == []


def test_the_default_metrics_are_those_of_lm_eval():
    from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY

    assert {key: (*value,) for key, value in DEFAULT_METRIC_REGISTRY.items()} == DEFAULT_METRICS
