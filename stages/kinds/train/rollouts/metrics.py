"""Metrics and warnings of a round of sampled completions, a file of some of them to read, and files of all episodes."""

import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from stages.core.contract import StageContext, is_main_process
from stages.core.files import remove_cut_off_line
from stages.kinds.train.rollouts.rounds import Group, Round, deviation
from stages.rollouts.episode_table import EpisodeRow, round_file, round_files, write_episodes
from stages.rollouts.prompts import RenderedPrompt

COMPLETIONS_FILE = "completions.jsonl"
NUM_SHOWN = 4
"""Number of prompts written to `completions.jsonl` from each sampling, and of completions for each prompt."""


class SampleFile:
    """File `completions.jsonl`, where people can read completions of all attempts; written on rank 0 only."""

    def __init__(self, context: StageContext) -> None:
        self._file = context.scratch / COMPLETIONS_FILE
        self._has_written = False
        shown: Path = context.work / COMPLETIONS_FILE
        self._file.touch()
        remove_cut_off_line(self._file)
        shown.unlink(missing_ok=True)
        shown.hardlink_to(self._file)

    def write(self, step: int, lines: Iterable[dict[str, object]]) -> None:
        """Append a training step's sampled completions to `completions.jsonl`. Within an attempt, steps must rise.

        The first sampling of an attempt replaces the lines that a killed attempt wrote from this step on.
        """
        if not self._has_written:
            self._has_written = True
            self._remove_from(step)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps({"step": step, **line}, ensure_ascii=False) + "\n" for line in lines)

    def _remove_from(self, step: int) -> None:
        """Delete the lines of `step` and later, in place, since the artifact has a hard link to the file."""
        with self._file.open("r+b") as stream:
            earlier = itertools.takewhile(lambda line: json.loads(line)["step"] < step, stream.readlines())
            stream.truncate(sum(map(len, earlier)))


def round_metrics(sampled: Round) -> dict[str, float]:
    """Return metrics of a sampling round: means and spreads of rewards, completion lengths, and durations.

    Several environments have the same metrics, `METRIC.NAME`, beside those of all episodes together.
    """
    by_environment: dict[str, list[Group]] = {}
    for group in sampled.groups:
        by_environment.setdefault(group.completions[0].environment, []).append(group)
    metrics = _group_metrics(sampled.groups)
    for name, groups in by_environment.items() if any(by_environment) else ():
        own = {"episode_share": len(groups) / len(sampled.groups), **_group_metrics(groups)}
        metrics |= {f"{metric}.{name}": value for metric, value in own.items()}
    return {**metrics, **sampled.measured}


def _group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of groups of completions; a mean is over the completions that have the reward or the number.

    The reward of an episode whose environment failed is unknown. Where all failed, the mean is of what they got before.
    """
    completions = [one for group in groups for one in group.completions]
    known = [one for one in completions if not one.has_failed] or completions
    rewards = _by_name(one.rewards for one in known)
    totals = [completion.reward for completion in known]
    return {
        "reward": statistics.fmean(totals),
        "reward_spread": deviation(totals),
        **{f"reward_{name}": statistics.fmean(values) for name, values in rewards.items()},
        **{f"reward_{name}_spread": deviation(values) for name, values in rewards.items()},
        "no_signal_share": statistics.fmean(not group.has_signal for group in groups),
        "completion_tokens": statistics.fmean(completion.num_sampled for completion in completions),
        "truncated_share": statistics.fmean(completion.truncated for completion in completions),
        **{
            f"episode_{name}": statistics.fmean(values)
            for name, values in _by_name(one.episode for one in completions).items()
        },
    }


def _by_name(numbers: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return all values of each name."""
    by_name: dict[str, list[float]] = {}
    for one in numbers:
        for name, value in one.items():
            by_name.setdefault(name, []).append(value)
    return by_name


class EpisodeFiles:
    """Files of all episodes of all attempts, one for each round; written on rank 0 only."""

    def __init__(self, context: StageContext) -> None:
        self._kept, self._shown = context.scratch, context.work
        self._has_written = False
        for first_step in round_files(self._kept):
            self._show(first_step)

    def write(self, first_step: int, episodes: Sequence[EpisodeRow]) -> None:
        """Write the episodes of a round. The first round of an attempt replaces those of a killed one from it on."""
        if not self._has_written:
            self._has_written = True
            for folder in (self._kept, self._shown):
                for step, file in round_files(folder).items():
                    if step >= first_step:
                        file.unlink()
        file = round_file(self._kept, first_step)
        file.parent.mkdir(exist_ok=True)
        write_episodes(file, episodes)
        self._show(first_step)

    def _show(self, first_step: int) -> None:
        """Give the artifact a hard link to a round's file, which stays in the scratch folder for later attempts."""
        shown = round_file(self._shown, first_step)
        shown.parent.mkdir(exist_ok=True)
        shown.unlink(missing_ok=True)
        shown.hardlink_to(round_file(self._kept, first_step))


class RoundSamples:
    """Writer of each round's episodes, and of some completions, on rank 0 only; warns of a reward equal for all."""

    def __init__(self, context: StageContext, prompts: Sequence[RenderedPrompt]) -> None:
        self._context = context
        self._prompts = prompts
        self._warned: set[str] = set()
        self._files = (SampleFile(context), EpisodeFiles(context)) if is_main_process() else None

    def write(self, sampled: Round) -> None:
        if self._files is None:
            return
        for name, values in _by_name(one.rewards for one in sampled.completions).items():
            if len({*values}) == 1 and name not in self._warned:
                self._warned.add(name)
                self._context.warn(
                    f"step {sampled.first_step}: the reward {name} is {values[0]:g} for all {len(values)} completions, "
                    "so it has no effect"
                )
        some, episodes = self._files
        some.write(sampled.first_step, self._lines(sampled))
        if rows := list(self._episode_rows(sampled)):
            episodes.write(sampled.first_step, rows)

    def _episode_rows(self, sampled: Round) -> Iterator[EpisodeRow]:
        for group in sampled.groups:
            prompt = self._prompts[group.prompt]
            for number, completion in enumerate(group.completions):
                if completion.end is None:  # an answer to a prompt, without an environment
                    return
                assert completion.prompt is not None and completion.transcript is not None
                yield EpisodeRow(
                    row=str(prompt.place),
                    prompt=completion.prompt_text,
                    reference=prompt.prompt.reference,
                    step=sampled.first_step,
                    sample=number,
                    seed=completion.seed,
                    text=completion.text,
                    transcript=completion.transcript,
                    end=completion.end,
                    num_tokens=completion.num_sampled,
                    total=completion.reward,
                    prompt_ids=completion.prompt,
                    segments=list(completion.segments),
                    rewards=completion.rewards,
                    metrics=completion.episode,
                    environment=completion.environment or None,
                )

    def _lines(self, sampled: Round) -> Iterator[dict[str, object]]:
        for group in sampled.groups[:NUM_SHOWN]:
            prompt = self._prompts[group.prompt]
            for completion in group.completions[:NUM_SHOWN]:
                yield {
                    "row": str(prompt.place),
                    "prompt": prompt.text,
                    "reference": prompt.prompt.reference,
                    **completion.shown,
                    "rewards": completion.rewards,
                    "reward": completion.reward,
                }
