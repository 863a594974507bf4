"""Metrics and warnings of a round of sampled completions, and a file of some completions for people to read."""

import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from stages.core.contract import StageContext, is_main_process
from stages.core.files import remove_cut_off_line
from stages.kinds.train.rollouts.rounds import Round, deviation
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
    """Return metrics of a sampling round: means and spreads of rewards, completion lengths, and durations."""
    completions = sampled.completions
    by_name = {name: [completion.rewards[name] for completion in completions] for name in completions[0].rewards}
    episode = completions[0].episode
    totals = [completion.reward for completion in completions]
    return {
        "reward": statistics.fmean(totals),
        "reward_spread": deviation(totals),
        **{f"reward_{name}": statistics.fmean(values) for name, values in by_name.items()},
        **{f"reward_{name}_spread": deviation(values) for name, values in by_name.items()},
        "no_signal_share": statistics.fmean(not group.has_signal for group in sampled.groups),
        "completion_tokens": statistics.fmean(completion.num_sampled for completion in completions),
        "truncated_share": statistics.fmean(completion.truncated for completion in completions),
        **{f"episode_{name}": statistics.fmean(one.episode[name] for one in completions) for name in episode},
        **sampled.measured,
    }


class RoundSamples:
    """Writer of some completions of each round, on rank 0 only; warns of a reward that is equal for all completions."""

    def __init__(self, context: StageContext, prompts: Sequence[RenderedPrompt]) -> None:
        self._context = context
        self._prompts = prompts
        self._warned: set[str] = set()
        self._file = SampleFile(context) if is_main_process() else None

    def write(self, sampled: Round) -> None:
        if self._file is None:
            return
        for name in sampled.completions[0].rewards:
            values = {one.rewards[name] for one in sampled.completions}
            if len(values) == 1 and name not in self._warned:
                self._warned.add(name)
                self._context.warn(
                    f"step {sampled.first_step}: the reward {name} is {values.pop():g} for all "
                    f"{len(sampled.completions)} completions, so it has no effect"
                )
        self._file.write(sampled.first_step, self._lines(sampled))

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
