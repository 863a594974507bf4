"""Writer of a first recipe for a person's data (`lifecycle init`), with an evaluation task from held-out rows.

Each proposed value has its reason in a comment: sizes follow from the rows, the learning rate from the size of the
model and the method, and the choice of an adapter from this machine's memory.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from flows.planning.layout_choice import choose_layout
from flows.planning.survey import IMAGES, SHORT_ANSWER_CHARACTERS, KnownModel, Survey, find_model, survey
from flows.recipe.recipe import load_recipe
from stages.core.errors import DataError, LayoutError
from stages.data.config import ROW_KINDS
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.registry import METHODS
from stages.models.shape import ModelShape
from stages.rewards.number import NUMBER

FEW_TOKENS = 200_000
"""Total tokens over all epochs below which packed rows are made shorter: a hundred steps of four rows of 512 tokens."""
LONGEST_ROW = 8192
FASTER_ADAPTER = 10
"""Factor by which an adapter's learning rate exceeds that of training the whole model (Schulman et al. 2025)."""
ADAPTERS = {
    "rank 16": "{rank: 16, alpha: 32, target_modules: all-linear}",
    "4 bits": "{rank: 16, alpha: 32, target_modules: all-linear, base_precision: nf4}",
}
METHOD_FOR = {method.rows: method for method in METHODS.values() if method.usual_learning_rates}
"""Training method that a first recipe uses, by kind of rows (`prompts`, `pairs`, …)."""
MEDIA = "    media: true                    # the files that its rows name, too\n"
DEFAULT_MODEL = "hf://Qwen/Qwen3-0.6B"
GROUPS, GENERATIONS = 16, 8
"""Number of prompts in each GRPO step of a first recipe, and number of answers sampled to each prompt."""


@dataclass(frozen=True)
class Starter:
    """First recipe and its other files, texts or pictures, by relative path, with notes for the person."""

    files: dict[str, str | bytes]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """Facts from which a first recipe is written: name, data, model and adapter (key of `ADAPTERS`, if any)."""

    name: str
    data: Path
    model: KnownModel
    rows: Survey
    adapter: str | None = None

    @property
    def method(self) -> str:
        return METHOD_FOR[self.rows.kind].name

    @property
    def samples(self) -> bool:
        """Return whether the training method samples answers to prompts instead of learning from given answers."""
        return METHOD_FOR[self.rows.kind].needs_rollouts

    @property
    def billions(self) -> float:
        """Return the model's billions of parameters: from its config, else from a name such as `Qwen3-0.6B`, else 7."""
        if self.model.shape:
            return self.model.shape.num_parameters / 1e9
        # qwen3-0.6b -> 0.6; not the 3 of a family, nor the 8 of 8bit
        named = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])", self.model.source.lower())
        return float(named[0][0]) / (1000 if named[0][1] == "m" else 1) if named else 7.0

    @property
    def longest_allowed(self) -> int:
        """Return the most tokens of a row that the recipe trains on, limited by the model's longest text."""
        return min(LONGEST_ROW, _power_of_two_below(self.model.max_positions or LONGEST_ROW))

    @property
    def completion_tokens(self) -> int:
        """Return the most tokens of an answer that is sampled in training."""
        return min(512, self.longest_allowed // 2)

    @property
    def sequence_length(self) -> int:
        """Return a packed row's length in tokens: the smallest power of two that fits the longest row, within limits.

        Short where there is little to learn from: a hundred short rows, packed into three, would be two steps.
        """
        few = self.rows.num_tokens * self.epochs < FEW_TOKENS
        needed = self.rows.longest + (self.completion_tokens if self.samples else 0)
        return _power_of_two(needed, least=128 if few else 512, most=self.longest_allowed)

    @property
    def is_over_long(self) -> bool:
        """Return whether some rows of the data may be longer than a packed row."""
        return self.rows.longest > self.sequence_length

    @property
    def epochs(self) -> int:
        """Return the number of epochs in a first recipe: three for fewer than 20,000 rows, else one."""
        return 3 if self.rows.num_rows < 20_000 else 1

    @property
    def num_packed_rows(self) -> int:
        """Return the approximate number of packed rows per epoch."""
        return max(1, self.rows.num_tokens // self.sequence_length)

    @property
    def batch(self) -> int:
        """Return the number of packed rows per step; training takes at least a hundred steps if the rows suffice."""
        # About 200 steps in all, within 4 to 64 rows a step.
        wanted = _power_of_two(self.num_packed_rows * self.epochs / 200, least=4, most=64)
        return min(wanted, _power_of_two_below(self.num_packed_rows))

    @property
    def num_steps(self) -> int:
        """Return the approximate number of optimizer steps of the whole training."""
        if self.samples:
            return max(1, self.rows.num_rows * self.epochs // GROUPS)
        return max(1, self.num_packed_rows * self.epochs // self.batch)

    @property
    def learning_rate(self) -> float:
        """Return the AdamW learning rate that a first recipe uses, by method and model size, higher for an adapter."""
        rate = next(rate for most, rate in METHOD_FOR[self.rows.kind].usual_learning_rates if self.billions <= most)
        return rate * FASTER_ADAPTER if self.adapter else rate


def starter(name: str, data: Path, model: str, columns: Mapping[str, str]) -> Starter:
    """Return the first recipe `NAME.yaml` for a person's data and model, with an evaluation task of held-out rows.

    Raises DataError for rows that cannot be read, or that the model cannot learn from.
    """
    data = data.absolute()
    with tempfile.TemporaryDirectory() as scratch:
        known = find_model(model, Path(scratch))
        rows = survey(data, columns, known)
    if rows.media_kinds and model == DEFAULT_MODEL:
        raise DataError(
            f"{data} has rows with media, and {model} reads text alone; name a model that reads them (`--model`)"
        )
    plan, notes = _with_adapter(_Plan(name, data, known, rows))
    files: dict[str, str | bytes] = {f"{name}.yaml": _recipe(plan), **_other_files(plan)}
    files |= {f"tasks/{path}": picture for path, picture in rows.pictures.items()}
    return Starter(files, (*_notes(plan), *notes))


def _notes(plan: _Plan) -> list[str]:
    rows = plan.rows
    counted = "" if rows.is_counted else "about "
    notes = [
        f"{plan.data}: {rows.num_rows:,} rows"
        + (f" in the format {rows.form}" if rows.form != "auto" else " of prompts with right answers")
        + f", {counted}{rows.num_tokens:,} tokens"
    ]
    if rows.columns:
        read = ", ".join(f"{theirs} as {ours}" for theirs, ours in rows.columns.items())
        notes.append(f"columns: {read}; `--columns` changes that")
    if not rows.is_counted:
        notes.append(
            f"the tokenizer of {plan.model.source} has not counted all rows: lengths are upper bounds for any tokenizer"
        )
    if rows.num_bad_rows:
        notes.append(f"{rows.num_bad_rows:,} bad rows, which are left out; the first is {rows.first_bad}")
    if plan.is_over_long and not plan.samples:
        notes.append(f"rows of more than {plan.sequence_length:,} tokens are {_over_long(plan)[1]}")
    if rows.template:
        notes.append(f"the chat template is templates/{rows.template.name}: the model's own does not write these rows")
    if not rows.questions:
        notes.append("no task: no held-out row has a question and an answer in words; name one of lm-eval's in `tasks`")
    return notes


def _with_adapter(plan: _Plan) -> tuple[_Plan, list[str]]:
    """Return a first recipe's facts, with a LoRA adapter if this machine cannot train the whole model."""
    # The whole model, then an adapter, then an adapter on a base in 4 bits: the first that fits is taken.
    tried = [plan, *(_Plan(plan.name, plan.data, plan.model, plan.rows, adapter) for adapter in ADAPTERS)]
    if plan.samples:
        tried.pop()  # no server samples beside a base in 4 bits
    shape = plan.model.shape or _like(plan.billions)
    for candidate in tried:
        if _fits(candidate, shape):
            return candidate, []
    return tried[-1], [f"even an adapter of {plan.model.source} is predicted not to fit the memory of this machine"]


def _fits(plan: _Plan, shape: ModelShape) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        # The very text that would be written is loaded, so that what is checked is what the person gets.
        for name, text in (_other_files(plan) | {"recipe.yaml": _recipe(plan)}).items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        config = load_recipe(Path(folder) / "recipe.yaml").stages[plan.method]
    assert isinstance(config, TrainConfig)
    try:
        best = choose_layout(plan.method, config, shape).candidates[0]
    except LayoutError:
        return False
    return not best.layout.cpu_offload  # an adapter is better than offloading the optimizer to the host


def _like(billions: float) -> ModelShape:
    """Return a plausible model shape for a number of parameters (12 × layers × width²), with width 128 × layers."""
    # 7 billion -> 33 layers, 4,224 wide
    layers = max(2, round((billions * 1e9 / (12 * 128**2)) ** (1 / 3)))
    width = 128 * layers
    return ModelShape(layers, width, layers, layers, 128, 8 * width // 3, 32_000)


def _power_of_two(wanted: float, least: int, most: int) -> int:
    power = least
    while power < wanted and power < most:
        power *= 2
    return min(power, most)


def _power_of_two_below(most: int) -> int:
    return 1 << (max(1, most).bit_length() - 1)


def _over_long(plan: _Plan) -> tuple[str, str]:
    """Return what a first recipe does with rows that are too long: its field's value, and the same in words."""
    if not plan.is_over_long:
        return "fail", ""
    if plan.rows.form == "text":
        return "truncate", "cut off there"
    return "drop", "left out"


def _other_files(plan: _Plan) -> dict[str, str]:
    """Return the other files of a first recipe by path: an evaluation task with its questions, and a chat template."""
    name, rows = plan.name, plan.rows
    files: dict[str, str] = {}
    if rows.questions:
        lines = rows.questions
        if _asks_numbers(plan):
            lines = [{**line, "answer": _last_number(line["answer"])} for line in lines]
        files |= {
            f"tasks/{name}.yaml": _task(plan),
            f"tasks/{name}.jsonl": "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines),
        }
    if rows.template:
        files[f"templates/{rows.template.name}"] = rows.template.read_text(encoding="utf-8")
    return files


def _asks_numbers(plan: _Plan) -> bool:
    """Return whether every right answer contains a number, so that answers are judged by their last number."""
    return plan.samples and all(NUMBER.search(reference) for reference in plan.rows.references)


def _last_number(text: str) -> str:
    numbers = NUMBER.findall(text)
    # 1,234 -> 1234, as the task ignores commas in answers.
    return numbers[-1].replace(",", "") if numbers else text


def _task(plan: _Plan) -> str:
    name, questions = plan.name, plan.rows.questions
    task: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
    }
    held_out = not plan.samples or plan.rows.evaluation_split
    whose = "Held-out rows" if held_out else "The first rows, which training sees as well,"
    if "text" in questions[0]:
        task |= {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        task["metric_list"] = [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}]
        return f"# {whose}; how likely they are is scored.\n{_lines(task)}"
    if plan.rows.system:
        task["description"] = "{{ " + json.dumps(plan.rows.system) + " }}"  # a text to Jinja, whatever it holds
    task |= {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
    if plan.rows.pictures:  # each stands where the question has `<image>`
        task["doc_to_image"] = [IMAGES]
    longest = max(len(question["answer"]) for question in questions)
    if _asks_numbers(plan):
        # No stop text: an answer that reasons has several lines.
        generation = {"until": [], "max_gen_toks": plan.completion_tokens}
        task |= {"output_type": "generate_until", "generation_kwargs": generation}
        # -1: the last match in the answer, whose reasoning may hold other numbers.
        pattern = {"function": "regex", "group_select": -1, "regex_pattern": r"(-?\d[\d,]*(?:\.\d+)?)"}
        task["filter_list"] = [{"name": "none", "filter": [pattern, {"function": "take_first"}]}]
        task["metric_list"] = [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "regexes_to_ignore": [","]}
        ]
        how = "the last number of an answer must be the right one"
    elif plan.samples or median(len(question["answer"]) for question in questions) <= SHORT_ANSWER_CHARACTERS:
        most = plan.completion_tokens if plan.samples else _power_of_two(longest, least=16, most=256)
        task |= {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": most}}
        task["metric_list"] = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
        how = "answers must be equal"
    else:
        task |= {"output_type": "loglikelihood", "target_delimiter": ""}
        task["metric_list"] = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]
        how = "answers are long: how likely they are is scored"
    return f"# {whose} as questions; {how}.\n{_lines(task)}"


def _lines(tree: dict[str, Any]) -> str:
    return "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in tree.items())


def _recipe(plan: _Plan) -> str:
    rows, method = plan.rows, plan.method
    data = {"dataset": "rows", "split": rows.split, "evaluation_split": rows.evaluation_split}
    if plan.samples:
        del data["evaluation_split"]
    else:
        data["format"] = rows.form
    lines = [
        f"{field}: {_scalar(value)}" for field, value in data.items() if value and (field, value) != ("split", "train")
    ]
    if rows.held_out_fraction:
        lines.append(
            f"evaluation_fraction: {rows.held_out_fraction}   # chosen by the content of a row, the same in every run"
        )
    if rows.columns:
        lines.append(f"columns: {json.dumps(rows.columns, ensure_ascii=False)}")
    if rows.template:
        lines.append(f"chat_template: templates/{rows.template.name}")
    longest = f"has {rows.longest:,} tokens" if rows.is_counted else f"has at most {rows.longest:,} tokens, one a byte"
    what = ROW_KINDS[rows.kind].noun
    lines.append(f"sequence_length: {plan.sequence_length}        # the longest {what} {longest}")
    if not plan.samples:
        lines.append(f"over_long: {_over_long(plan)[0]}")
        if rows.num_bad_rows:
            lines.append("on_bad_rows: drop")
            lines.append(f"max_bad_row_fraction: {rows.bad_fraction}   # {rows.num_bad_rows:,} rows are bad")
    why_adapter = f"all {_size(plan.billions)} weights with their optimizer do not fit this machine's memory"
    adapter = f"    adapter: {ADAPTERS[plan.adapter]}   # {why_adapter}\n" if plan.adapter else ""
    options = _grpo(plan) if plan.samples else ""
    options += f"    media: {json.dumps(rows.bounds.named)}   # of videos\n" if rows.bounds.named else ""
    what_learns = "of the adapter" if plan.adapter else "all of them trained"
    text = f"""\
# {rows.num_rows:,} rows of {plan.data.name}, learned by {plan.model.source}.
# `lifecycle plan {plan.name}.yaml` says what would run.
name: {_scalar(plan.name)}

stages:
  base:
    kind: download
    model: {json.dumps(plan.model.source)}

  rows:
    kind: download
    dataset: {json.dumps(f"file://{plan.data}")}
{MEDIA if rows.media_kinds else ""}
  {method}:
    kind: train
    method: {method}
    model: base
{adapter}    data:
{"".join(f"      {line}" + chr(10) for line in lines)}{options}    epochs: {plan.epochs}
    global_batch_size: {_batch(plan)}
    layout: auto                   # the fastest that fits this machine; `lifecycle layouts {plan.name}.yaml --gpus 8`
    learning_rate: {plan.learning_rate:.1e}         # usual for {_size(plan.billions)} parameters, {what_learns}
    warmup_steps: {plan.num_steps // 20}
    max_grad_norm: 1.0
"""
    if plan.adapter:
        text += f"""
  merged:
    kind: merge
    model: base
    adapter: {method}
    max_difference: 0.1            # nats a token: training computed with the base in other digits
"""
    return text + (_evaluation(plan) if rows.questions else "")


def _scalar(word: str) -> str:
    """Return a word as YAML, in quotes where it would be a number, a truth value or null."""
    return word if yaml.safe_load(word) == word else json.dumps(word)


def _size(billions: float) -> str:
    return f"{billions:.2g}B" if billions >= 0.95 else f"{1000 * billions:.3g}M"


def _batch(plan: _Plan) -> str:
    if plan.samples:
        return f"{GROUPS * GENERATIONS}         # answers; about {plan.num_steps:,} steps in all"
    return f"{plan.batch}           # packed rows; about {plan.num_steps:,} steps in all"


def _grpo(plan: _Plan) -> str:
    reward = "number" if _asks_numbers(plan) else "exact_match"
    return f"""\
    grpo:
      num_generations: {GENERATIONS}
      max_completion_length: {plan.completion_tokens}
      rewards:
        right: {{type: {reward}}}
"""


def _evaluation(plan: _Plan) -> str:
    final = "merged" if plan.adapter else plan.method
    rows = plan.rows
    whose = "rows that training holds out" if not plan.samples or rows.evaluation_split else "rows as questions"
    texts = []
    evaluated = {"evaluate-base": "base", "evaluate": final}
    if rows.pictures and not rows.has_template:  # pictures are asked about in chats alone
        del evaluated["evaluate-base"]
    most_images = max((len(one.get(IMAGES, ())) for one in rows.questions), default=0)
    serving = f"max_model_len: {_context(plan)}" + (f", max_images: {most_images}" if most_images else "")
    for stage, model in evaluated.items():
        # A base model without a chat template is asked in plain text; the trained one has the recipe's.
        is_chat = not rows.is_plain and (rows.has_template or model != "base")
        asked = "" if plan.samples else f"    apply_chat_template: {json.dumps(is_chat)}\n"
        texts.append(f"""
  {stage}:
    kind: evaluate
    model: {model}
    serving: {{{serving}}}
    tasks: [{_scalar(plan.name)}]                # tasks/{plan.name}.yaml: {whose}
    task_folder: tasks
{asked}""")
    promotion = f"""
  promote:                         # champion of this name if it is no worse than the champion before it
    kind: promote
    name: {_scalar(plan.name)}
    model: {final}
    evaluations: [evaluate]
"""
    if len(evaluated) > 1:
        promotion += (
            "    baselines: [evaluate-base]     # remove this line once there is a champion, to compare with it\n"
        )
    return "".join([*texts, promotion])


def _context(plan: _Plan) -> int:
    """Return the context length in tokens of a first recipe's server, long enough for a question and its answer."""
    return min(plan.model.max_positions or 2 * plan.sequence_length, 2 * plan.sequence_length)
