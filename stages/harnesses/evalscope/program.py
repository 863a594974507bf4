"""Program that runs EvalScope: `PYTHON program.py REQUEST.json`, with the model's API key in EVALSCOPE_API_KEY.

Runs in EvalScope's environment and imports nothing of ours; `running.py` reads its results below the request's `work`
(`TASK/reviews/…`, `TASK/reports/…`). Answers of an earlier attempt are not asked again.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from evalscope import TaskConfig, run_task
from evalscope.api.benchmark import BenchmarkMeta, DefaultDataAdapter
from evalscope.api.dataset import Sample
from evalscope.api.registry import register_benchmark
from evalscope.models.utils.openai import chat_messages_from_openai

REQUEST_TIMEOUT_S = 300
QUESTION_SET = "question_set"


@register_benchmark(
    BenchmarkMeta(
        name=QUESTION_SET,
        pretty_name="Question set",  # without a name and a description, writing the report fails
        description="Question set whose answers are right if they equal the expected text.",
        dataset_id=QUESTION_SET,
        metric_list=["exact_match"],
        few_shot_num=0,
        train_split=None,
        eval_split="test",
        prompt_template="{question}",
    )
)
class QuestionSet(DefaultDataAdapter):
    """EvalScope benchmark of rows {"messages": […], "answer": text}; its own `general_qa` knows only BLEU and Rouge."""

    def load_from_disk(self, **options: Any) -> Any:
        return super().load_from_disk(use_local_loader=True)

    def record_to_sample(self, record: dict[str, Any]) -> Any:
        messages = chat_messages_from_openai(model="", messages=record["messages"])
        return Sample(input=messages, target=record["answer"])

    def extract_answer(self, prediction: str, task_state: Any) -> str:
        return prediction.strip()


def main() -> None:
    """Run the tasks of a JSON file in EvalScope; its errors are raised, as a failed sample is no score of 0."""
    request = json.loads(Path(sys.argv[1]).read_bytes())
    for task in request["tasks"]:
        _run(task, request)


def _run(task: dict[str, Any], request: dict[str, Any]) -> None:
    work = Path(request["work"], task["folder"])
    generation = {**request["generation"], "timeout": REQUEST_TIMEOUT_S}
    generation["stop_seqs"] = generation.pop("stop") or None
    arguments = {} if request["num_fewshot"] is None else {"few_shot_num": request["num_fewshot"]}
    name = task["name"]
    if task["questions"]:  # FOLDER/SUBSET.jsonl
        questions = Path(task["questions"])
        name = task["benchmark"] or QUESTION_SET
        arguments = {"local_path": str(questions.parent), "subset_list": [questions.stem]}
        if task["benchmark"]:
            arguments["metric_list"] = task["metrics"]
    run_task(
        TaskConfig(
            model=request["model"],
            api_url=f"{request['url']}/v1",
            api_key=os.environ["EVALSCOPE_API_KEY"],
            eval_type="openai_api",
            datasets=[name],
            dataset_args={name: arguments},
            dataset_dir=request["dataset_folder"],
            dataset_hub="huggingface",  # from ModelScope it would run code that comes with a dataset
            generation_config=generation,
            eval_batch_size=request["concurrent_requests"],
            work_dir=str(work),
            use_cache=str(work) if (work / "predictions").exists() else None,
            no_timestamp=True,
            limit=request["limit"],
            ignore_errors=False,
            collect_perf=False,
            **({} if request["seed"] is None else {"seed": request["seed"]}),
        )
    )


if __name__ == "__main__":
    main()
