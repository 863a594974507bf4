"""Generate stage: samples completions of prompts from a served model, scores them, and writes kept ones as dataset.

In: a dataset's artifact, and a model's, or a serve stage's with a lease. Out: `data/train.jsonl`; `completions.jsonl`
(prompt, text, seed, each reward, their sum, and outcome: `kept`, `chosen`, `rejected`, or why it was dropped); in
`rewards/` what rewards keep, such as a judge's answers.
"""

import json
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.core.contract import StageContext, StageResult
from stages.core.errors import DataError, full_disk_named
from stages.kinds.generate.config import GenerateConfig
from stages.kinds.generate.selection import Candidate, Choice, Row, choose
from stages.rewards.judging import Judgement, Named, judging
from stages.rewards.reward import RewardContext
from stages.rollouts.acting import PlayedEpisode, episode_metrics, episode_rows, judged, play_all
from stages.rollouts.asking import Sample, sample_all
from stages.rollouts.environments.environment import EnvironmentConfig
from stages.rollouts.episode_table import EPISODES_FILE, write_episodes
from stages.rollouts.prompts import RenderedPrompt, check_pictures, check_room, prompt_media, read_prompts
from stages.serving.endpoint import endpoint_for
from stages.serving.served_models import ServedModel

COMPLETIONS_FILE = "completions.jsonl"
NOT_LISTED = {"prompt", "segments", "asked", "answer", "prompt_text", "prompt_ids"}
"""Fields of samples that lines of the file do not have."""
REWARDS_FOLDER = "rewards"
PROGRESS_EVERY = 10
NUM_NAMED = 5


@dataclass(frozen=True)
class ScoredPrompt:
    """Prompt with its completions, their rewards, and which of them are kept."""

    prompt: RenderedPrompt
    candidates: Sequence[Candidate]
    choice: Choice


def run(config: GenerateConfig, context: StageContext) -> StageResult:
    """Sample completions, score them, and write those that are kept as training rows.

    Raises DataError for unusable prompts, completions that cannot be judged, or no rows; ModelError, ResourceError or
    ServerError for a server that does not come up; TransientError when it goes away.
    """
    # SystemExit leaves the contexts below, which end a server of ours.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    kept = context.scratch / f"rewards-{context.version}"
    with judging(config.rewards, RewardContext(context.inputs, kept, context.warn)) as judge:
        with endpoint_for(config, context) as endpoint:
            data, model = config.prompt_folder(context.inputs), endpoint.spec.model
            media = prompt_media(data, config.prompts.split, model)
            prompts = read_prompts(data, config.prompt_options, endpoint.asked_folder, media, model)
            served = endpoint.await_model()
            started_s = time.monotonic()
            if config.environment:
                played = _played(prompts, served, config, config.environment, context)
                samples: Sequence[Sample] = played
            else:
                samples = _sampled(prompts, served, config, context)
            seconds = time.monotonic() - started_s
        context.doing("judging the completions")
        named = list(_named(prompts, samples))
        judgements = judged(judge, named, played) if config.environment else judge(named)
    if kept.exists():
        shutil.copytree(kept, context.work / REWARDS_FOLDER, dirs_exist_ok=True)
    answered = list(_chosen(prompts, samples, judgements, config))
    num_rows = _write(answered, config, context)
    files = [COMPLETIONS_FILE]
    if config.environment:
        write_episodes(context.work / EPISODES_FILE, episode_rows(prompts, played, judgements))
        files.append(EPISODES_FILE)
    metrics = {"num_rows": float(num_rows), **_metrics(answered, config, context)}
    metrics["generate_s"] = seconds
    metrics["output_tokens_per_s"] = sum(sample.num_tokens for sample in samples) / seconds
    context.milestone(f"{num_rows} rows of {len(samples)} completions of {len(prompts)} prompts")
    if config.environment:
        metrics |= episode_metrics(played)
    return StageResult(metrics=metrics, tags=endpoint.spec.version_tag, files=files)


def _sampled(
    prompts: Sequence[RenderedPrompt], served: ServedModel, config: GenerateConfig, context: StageContext
) -> list[Sample]:
    check_room(prompts, served.context_tokens, config.max_tokens)
    check_pictures(prompts, served.max_images)
    pictures = {number: prompt.pictures for number, prompt in enumerate(prompts) if prompt.pictures}
    if pictures and not served.reached:
        raise DataError(
            f"prompts with pictures, such as {prompts[min(pictures)].place}, are asked of the engine itself, which is "
            f"reached on the machine that runs {config.model} alone; name the stage that made the model in `model`"
        )

    def report(num_done: int, num_all: int) -> None:
        if num_done % PROGRESS_EVERY == 0 or num_done == num_all:
            context.progress(num_done, num_all, "completions", "generating")

    kept = context.scratch / f"completions-{context.version}.jsonl"
    token_ids = [prompt.token_ids for prompt in prompts]
    with full_disk_named("keeping completions", kept):
        return sample_all(
            served.client, token_ids, config.sampling_options, kept, report, pictures=pictures, server=served.reached
        )


def _played(
    prompts: Sequence[RenderedPrompt],
    served: ServedModel,
    config: GenerateConfig,
    environment: EnvironmentConfig,
    context: StageContext,
) -> list[PlayedEpisode]:
    check_room(prompts, served.context_tokens, config.max_tokens)
    kept = context.scratch / f"episodes-{context.version}.jsonl"

    def report(num_done: int, num_all: int) -> None:
        context.progress(num_done, num_all, "episodes", "acting")

    with full_disk_named("keeping episodes", kept):
        return play_all(served, prompts, environment, config.sampling_options, kept, report, context.warn)


def _named(prompts: Sequence[RenderedPrompt], samples: Sequence[Sample]) -> Iterator[Named]:
    for sample in samples:
        prompt = prompts[sample.prompt]
        completion = prompt.completion(sample.text, sample.num_tokens)
        yield f"completion {sample.sample} of the prompt in {prompt.place}", completion


def _chosen(
    prompts: Sequence[RenderedPrompt],
    samples: Sequence[Sample],
    judgements: Sequence[Judgement],
    config: GenerateConfig,
) -> Iterator[ScoredPrompt]:
    candidates = [Candidate(*pair) for pair in zip(samples, judgements, strict=True)]
    for number, prompt in enumerate(prompts):
        # The samples of a prompt stand together, in the order of the prompts.
        own = candidates[number * config.num_samples : (number + 1) * config.num_samples]
        yield ScoredPrompt(prompt, own, choose(prompt.prompt, own, config))


def _write(answered: Sequence[ScoredPrompt], config: GenerateConfig, context: StageContext) -> int:
    """Write the training rows and all completions; returns the number of rows. Without any row, the stage fails."""
    data = context.work / "data"
    data.mkdir(exist_ok=True)
    with full_disk_named("writing completions", context.work):
        rows = [row for prompt in answered for row in _with_pictures(prompt, data)]
        _write_lines(context, "data/train.jsonl", rows)
        _write_lines(context, COMPLETIONS_FILE, (line for prompt in answered for line in _lines(prompt)))
    if not rows:
        dropped = Counter(outcome for prompt in answered for outcome in prompt.choice.outcomes)
        reasons = ", ".join(f"{count} {outcome}" for outcome, count in dropped.most_common(NUM_NAMED))
        context.refuse(
            DataError(
                f"`keep: {config.keep}` leaves nothing of {dropped.total()} completions: {reasons}; read them in "
                f"{COMPLETIONS_FILE}, and raise num_samples or the temperature, or fix the rewards"
            )
        )
    return len(rows)


def _with_pictures(answered: ScoredPrompt, data: Path) -> list[Row]:
    """Return a prompt's training rows with the paths of its pictures, which are copied to the rows' folder."""
    pictures, rows = answered.prompt.pictures, answered.choice.rows
    if pictures is None or not rows:
        return [*rows]
    paths = [pictures.folder.copied(reference, data) for reference in pictures.media]
    return [{**row, "images": paths} for row in rows]


def _write_lines(context: StageContext, file: str, rows: Iterable[object]) -> None:
    with (context.work / file).open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def _lines(answered: ScoredPrompt) -> Iterator[dict[str, object]]:
    prompt = answered.prompt
    for candidate, outcome in zip(answered.candidates, answered.choice.outcomes, strict=True):
        sample = candidate.sample.model_dump(exclude=NOT_LISTED)
        yield {
            "row": str(prompt.place),
            "prompt": prompt.text,
            "reference": prompt.prompt.reference,
            **sample,
            "rewards": candidate.judgement.rewards,
            "reward": candidate.judgement.total,
            "outcome": outcome,
        }


def _metrics(answered: Sequence[ScoredPrompt], config: GenerateConfig, context: StageContext) -> dict[str, float]:
    """Return metrics of completions and rewards; warns of a reward that is the same for all completions."""
    candidates = [candidate for prompt in answered for candidate in prompt.candidates]
    metrics = {
        "num_prompts": float(len(answered)),
        "num_completions": float(len(candidates)),
        "completion_tokens": statistics.fmean(candidate.sample.num_tokens for candidate in candidates),
        "truncated_share": statistics.fmean(candidate.sample.truncated for candidate in candidates),
    }
    if metrics["truncated_share"] == 1:
        bounds = " and ".join(sorted({candidate.sample.bound for candidate in candidates}))
        context.warn(f"every completion was cut off at {bounds}; raise it")
    names = list(candidates[0].judgement.rewards)
    if not names:
        return metrics
    totals = [[candidate.judgement.total for candidate in prompt.candidates] for prompt in answered]
    metrics["reward"] = statistics.fmean(total for group in totals for total in group)
    metrics["reward_spread"] = statistics.pstdev(total for group in totals for total in group)
    # Prompts whose completions all have one reward: by comparison, they teach nothing.
    metrics["no_signal_share"] = statistics.fmean(len(set(group)) == 1 for group in totals)
    for name in names:
        values = [candidate.judgement.rewards[name] for candidate in candidates]
        metrics[f"reward_{name}"] = statistics.fmean(values)
        if len(set(values)) == 1 and len(values) > 1:
            context.warn(
                f"the reward {name} is {values[0]:g} for all {len(values)} completions, so it distinguishes none"
            )
    return metrics
