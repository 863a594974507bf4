"""Training data of methods that sample: completions are sampled in rounds and cut into the steps' micro-batches.

In a round the server gets the current weights, which is checked; rank 0 samples and scores completions and writes them
to a file; every process reads it, packs its share, and computes the engine's log-probabilities. The steps of a round
learn from its parts, `num_iterations` times over.

A file is kept until a checkpoint is made after its round, so that a resumed run finds the round that was sampled with
the checkpoint's weights; later rounds are sampled again.

With `asynchronous: {lag: k}` the round is started that is learned k rounds later, and a thread of rank 0 samples it
meanwhile. A checkpoint waits for the k rounds that are under way: their weights are gone when a run is resumed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import ClassVar

import torch

from stages.core.contract import StageContext, is_main_process
from stages.data.batch import Batch
from stages.data.dataset import MOST_PICTURE_BYTES
from stages.data.files import portions
from stages.data.media.images import as_png_address
from stages.data.media.prompts import MOST_PROMPTS
from stages.data.media_reference import MediaReference
from stages.data.messages import Conversation
from stages.data.tokenizer import DocumentTokenizer
from stages.engines.engine import Engine, LossMeans
from stages.engines.loss import Loss
from stages.engines.recorded import RecordedBatch
from stages.kinds.train.batches import HeldOut
from stages.kinds.train.checkpoints import complete_checkpoints
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.media import check_media
from stages.kinds.train.methods.method import Method
from stages.kinds.train.methods.rollouts import RolloutOptions
from stages.kinds.train.rollouts.ahead import SamplingThread
from stages.kinds.train.rollouts.documents import (
    AnsweredPrompt,
    PackedAnswers,
    checked_prompts,
    completion_packing,
    most_tokens,
    turn_readers,
)
from stages.kinds.train.rollouts.metrics import COMPLETIONS_FILE, RoundSamples, round_metrics
from stages.kinds.train.rollouts.probe import BOUNDS_NATS, check_difference
from stages.kinds.train.rollouts.rounds import Round, RoundPlan, Sampler
from stages.kinds.train.rollouts.server import PolicyServer
from stages.kinds.train.rollouts.synced import GatheredWeights, SyncedServer
from stages.kinds.train.teacher import BuildEngine
from stages.kinds.train.watchdog import Watchdog
from stages.models.facts import ModelFacts
from stages.models.processor import MediaProcessor
from stages.models.recorded import ToolPrompt
from stages.parallel.processes import gathered
from stages.planner.workload import RowMedia
from stages.rewards.judging import Judge, judging
from stages.rewards.reward import RewardContext
from stages.rollouts.asking import request_seed
from stages.rollouts.environments.episodes import Episodes
from stages.rollouts.prompts import RenderedPrompt, media_kinds


class RolloutBatches:
    """Micro-batches of completions sampled round by round; the caller closes them, since they own a server."""

    made_ahead: ClassVar[bool] = False
    files: ClassVar[Sequence[str]] = (COMPLETIONS_FILE,)

    def __init__(
        self,
        data: RolloutData,
        engine: Engine,
        watchdog: Watchdog,
        server: SyncedServer,
        reference: Engine | None,
        *,
        last_step: int,
    ) -> None:
        self._context = data.context
        self._options = data.options
        self._engine = engine
        self._watchdog = watchdog
        self._prompts = data.prompts
        self._plan = data.plan
        self._reference = reference
        self._folder = data.context.scratch / "rollouts"
        self._server = server
        self._resources = ExitStack()
        self._resources.callback(self._server.close)
        self._judge: Judge | None = None
        self._players: dict[str, Episodes] | None = None
        self._data = data
        self._samples = RoundSamples(data.context, data.prompts)
        self._parts: list[list[PackedAnswers]] = []
        self._measured: dict[str, float] = {}
        self._is_first = True
        self._held_out = data.held_out
        self._num_evaluations = 0
        self._last_step = last_step
        self._ahead = SamplingThread() if self._plan.lag_steps and is_main_process() else None
        self._age_steps = 0
        """Age, in steps, of the weights that sampled a round, when its first step begins."""

    @property
    def steps_together(self) -> int:
        return self._plan.steps_per_round

    def micro_batches(self, step: int) -> list[Batch]:
        if self._plan.staleness(step) == 0:
            self._parts = self._new_round(step)
            self._watchdog.begins_step(step)
        return [packed.seen() for packed in self._parts[self._plan.part(step)]]

    def metrics(self, step: int, update_s: float) -> dict[str, float]:
        num_tokens = sum(int(one.batch.signal.has_target.sum()) for one in self._parts[self._plan.part(step)])
        return {
            **self._measured,
            "staleness_steps": float(self._age_steps + self._plan.staleness(step)),
            "train_s": update_s,
            "train_tokens_per_s": num_tokens / update_s,
        }

    @property
    def held_out(self) -> HeldOut | None:
        return self if self._held_out else None

    def evaluate(self, engine: Engine, loss: Loss, method: Method) -> LossMeans:
        """Return the rewards of the held-out prompts, answered once each with the engine's weights. Collective.

        The loss is the negative mean reward, so that less is better.
        """
        self._num_evaluations += 1
        self.settle()
        path = self._folder / "evaluation.json"
        once = self._options.model_copy(update={"num_generations": 1})

        def write(server: PolicyServer) -> None:
            replace(self._sampler(server), prompts=self._held_out, options=once).answer_all().write(path)

        self._server.sample(f"evaluation {self._num_evaluations}", write)
        metrics = round_metrics(Round.read(path))
        engine.broadcast_from_rank0(0.0)  # rank 0 overwrites the file only when all have read it
        kept = {name: metrics[name] for name in metrics if name.startswith("reward") and "_spread" not in name}
        kept |= {name: metrics[name] for name in ("completion_tokens", "truncated_share")}
        return LossMeans(-metrics["reward"], kept)

    def recorded(self) -> RecordedBatch:
        return self._server.recorded()

    def settle(self) -> None:
        if self._ahead:
            self._ahead.wait_for_all()

    def close(self) -> None:
        if self._ahead:
            self._server.give_up()
            self._ahead.close()
        self._resources.close()

    def _path(self, first_step: int) -> Path:
        return self._folder / f"step-{first_step}.json"

    def _new_round(self, step: int) -> list[list[PackedAnswers]]:
        if is_main_process():
            self._clear(step)
        return self._overlapped_round(step) if self._plan.lag_steps else self._synchronous_round(step)

    def _overlapped_round(self, step: int) -> list[list[PackedAnswers]]:
        """Start the sampling of a later round with the weights of now, and return the one that is learned now."""
        began_s = time.perf_counter()
        self._start_rounds(step)
        sync_s = time.perf_counter() - began_s
        self._watchdog.begins(f"the completions for step {step}")
        idle_shares = {}
        if self._ahead:
            self._ahead.wait_for(step)
            idle_shares = self._ahead.idle_shares()
        self._engine.broadcast_from_rank0(0.0)  # the others wait here until rank 0 has written the file
        sampled = Round.read(self._path(step))
        assert sampled.weights_step is not None
        self._age_steps = step - 1 - sampled.weights_step
        documents = self._documents(sampled)
        parts, differences = self._parts_of(documents, is_lagging=True), {}
        if self._age_steps == 0:
            of_engine = self._parts_of(documents)
            differences = self._differences(of_engine)
            check_difference(
                differences["mismatch_mean"], self._server.bound_dtype, f"at step {step}, the server that samples"
            )
        self._server.take_probe(documents)
        self._measured = {**round_metrics(sampled), **differences, **idle_shares, "sync_s": sync_s}
        self._samples.write(sampled)
        return parts

    def _start_rounds(self, step: int) -> None:
        """Gather the engine's weights, and let the rounds be sampled with them that are due. Collective."""
        due = self._plan.started_at(step, self._last_step, begins=self._is_first)
        self._is_first = False
        # Rank 0 decides for all: gathering weights is collective. Files are there if an attempt was killed.
        missing = [one for one in due if not self._engine.broadcast_from_rank0(float(self._is_kept(one)))]
        if not missing:
            return
        weights = self._server.gathered(f"step {step}")
        if self._ahead:
            self._open_judge()
            for first_step in missing:
                if (expected := self._plan.weights_step(first_step)) != step - 1:
                    self._context.warn(
                        f"the completions for step {first_step} were not kept when training was interrupted: they are "
                        f"sampled with the weights of step {step - 1}, where those of step {expected} are gone"
                    )
                given = weights if first_step == missing[0] else None
                self._ahead.start(first_step, partial(self._sample, first_step, step - 1, given), weights.close)

    def _is_kept(self, first_step: int) -> bool:
        """Return, on rank 0, whether an earlier attempt sampled a round with the weights of the plan."""
        path = self._path(first_step)
        return (
            is_main_process()
            and path.is_file()
            and Round.read(path).weights_step == self._plan.weights_step(first_step)
        )

    def _sample(self, first_step: int, weights_step: int, weights: GatheredWeights | None) -> None:
        """Sample a round in a thread of rank 0, and write it. weights: new ones; None: those that the server has."""
        began_s = time.perf_counter()
        server = self._server.give(weights) if weights else self._server.holding()
        given_s = time.perf_counter() - began_s
        sampled = self._sampler(server).sample(first_step)
        measured = {**sampled.measured, "hand_over_s": given_s}
        replace(sampled, weights_step=weights_step, measured=measured).write(self._path(first_step))

    def _synchronous_round(self, step: int) -> list[list[PackedAnswers]]:
        path, self._is_first = self._path(step), False
        # Rank 0 decides for all: sampling is collective. A file is there if an attempt was killed in this round.
        # The others do not look: a shared file system could remember that there was none.
        is_kept = bool(self._engine.broadcast_from_rank0(float(is_main_process() and path.is_file())))
        sync_s = 0.0
        if not is_kept:
            sync_s = self._server.sample(f"step {step}", partial(self._write_round, step))
        sampled = Round.read(path)
        began_s = time.perf_counter()
        documents = self._documents(sampled)
        parts = self._parts_of(documents)
        differences = self._differences(parts)
        # With top_p < 1 the server's log-probabilities are of the truncated distribution: they cannot be compared.
        if self._options.top_p == 1:
            if is_kept and differences["mismatch_mean"] > BOUNDS_NATS[self._server.bound_dtype]:
                self._context.warn(
                    f"the completions kept for step {step} were sampled with other weights: they are sampled again"
                )
                # All processes come here, since the mean is of all; another one may have removed the file.
                path.unlink(missing_ok=True)
                return self._synchronous_round(step)
            check_difference(
                differences["mismatch_mean"], self._server.bound_dtype, f"at step {step}, the server that samples"
            )
        self._server.take_probe(documents)
        self._measured = {
            **round_metrics(sampled),
            **differences,
            "sync_s": sync_s,
            "old_log_probabilities_s": time.perf_counter() - began_s,
        }
        self._samples.write(sampled)
        return parts

    def _write_round(self, step: int, server: PolicyServer) -> None:
        sampled = self._sampler(server).sample(step)
        replace(sampled, weights_step=step - 1).write(self._path(step))

    def _sampler(self, server: PolicyServer) -> Sampler:
        media_tokens = self._server.packing.media_tokens
        judge, players = self._open_judge(), self._open_environments()
        return Sampler(server, judge, self._prompts, self._options, self._plan, media_tokens, players)

    def _open_environments(self) -> dict[str, Episodes]:
        """Return the players of episodes by the environment's name; the first call opens the environments."""
        if self._players is None:
            self._players = {}
            most, of_turn = self._server.packing.most_tokens, self._options.max_completion_length
            for name, (config, reader) in turn_readers(self._data.config, self._data.model, self._prompts).items():
                for warning in config.warnings():
                    self._context.warn(warning)
                make = self._resources.enter_context(config.opened(self._context.scratch / "environments" / name))
                self._players[name] = Episodes(config, make, reader, most, of_turn, request_seed)
        return self._players

    def _open_judge(self) -> Judge:
        """Return the function that scores completions by the recipe's rewards; the first call opens their programs."""
        if self._judge is None:
            kept = self._context.work / "rewards"
            context = RewardContext(self._context.inputs, kept, self._context.warn)
            self._judge = self._resources.enter_context(judging(self._options.rewards, context))
        return self._judge

    def _clear(self, step: int) -> None:
        """Remove files of sampled completions that are no longer needed to resume, and those of an earlier attempt."""
        checkpoints = complete_checkpoints(self._context.scratch / "checkpoints")
        # Rounds up to the latest checkpoint are learned; those of an earlier attempt after it and its lag
        # were sampled with weights that no longer exist.
        latest = checkpoints[0][0] if checkpoints else 0
        for other in self._folder.glob("step-*.json"):
            first_step = int(other.stem.removeprefix("step-"))
            is_needed = step <= first_step <= step + self._plan.lag_steps
            if not is_needed and (self._is_first or first_step <= latest):
                other.unlink()

    def _documents(self, sampled: Round) -> list[AnsweredPrompt]:
        # NaN, which teaches nothing and counts in no mean, where the environment failed
        known = [math.nan if one.has_failed else one.reward for one in sampled.completions]
        rewards = torch.tensor(known, dtype=torch.float64)
        advantages = iter(self._options.advantages(rewards).tolist())
        return [
            completion.after(
                self._prompts[group.prompt].token_ids,
                next(advantages),
                is_learned=not (completion.truncated and self._options.mask_truncated_completions),
                pictures=self._prompts[group.prompt].pictures,
            )
            for group in sampled.groups
            for completion in group.completions
        ]

    def _parts_of(self, documents: Sequence[AnsweredPrompt], *, is_lagging: bool = False) -> list[list[PackedAnswers]]:
        """Return this process's micro-batches for each step of a round, with the old policy's log-probabilities.

        is_lagging: the engine may no longer have the weights that sampled, so those that the server gave are taken.
        """
        self._watchdog.begins("the engine's log-probabilities of the completions")
        # e.g. 96 completions, steps_per_generation 3: parts of 32, one for each optimizer step
        engine, size = self._engine, len(documents) // self._options.steps_per_generation
        shares = [
            self._server.packing.share(documents[first : first + size], engine.data_rank, engine.data_parallel_size)
            for first in range(0, len(documents), size)
        ]
        return [[self._with_log_probabilities(packed, is_lagging) for packed in share] for share in shares]

    def _with_log_probabilities(self, packed: PackedAnswers, is_lagging: bool) -> PackedAnswers:
        seen = packed.seen()
        assert seen.signal.rollouts and seen.signal.rollouts.server_log_probabilities is not None
        of_server = seen.signal.rollouts.server_log_probabilities
        reference = self._reference.target_log_probabilities(seen) if self._reference else None
        batch, of_engine = packed.batch, of_server
        if self._options.replay_experts:
            of_engine, experts = self._engine.routed_log_probabilities(seen)
            batch = batch.with_experts(experts)
        elif not is_lagging:
            of_engine = self._engine.target_log_probabilities(seen)
        rollouts = replace(
            seen.signal.rollouts,
            # the engine's: before the round's first update, when it still has the weights that sampled
            old_log_probabilities=of_engine,
            reference_log_probabilities=reference,
            # compared with no others of equal weights, they correct nothing
            server_log_probabilities=None if is_lagging else of_server,
        )
        return replace(packed, batch=batch.with_signal(rollouts=rollouts))

    def _differences(self, parts: Sequence[Sequence[PackedAnswers]]) -> dict[str, float]:
        """Return mean and largest |Δ log-probability| of tokens between sampling server and engine, in nats."""
        differences = [torch.zeros(1)]  # a process may have padding alone
        for batch in (packed.batch for part in parts for packed in part):
            assert batch.signal.rollouts and batch.signal.rollouts.server_log_probabilities is not None
            change = batch.signal.rollouts.old_log_probabilities - batch.signal.rollouts.server_log_probabilities
            differences.append(change[batch.signal.has_target].abs())  # [targets of the batch]
        of_tokens = torch.cat(differences).double()
        # [2]: sum of the differences, and number of tokens without the leading zero
        sums = torch.stack([of_tokens.sum(), torch.tensor(float(len(of_tokens) - 1), dtype=torch.float64)])
        total, count = self._engine.sum_over_data(sums).tolist()
        return {"mismatch_mean": total / max(1.0, count), "mismatch_max": max(gathered(of_tokens.max().item()))}


@dataclass(frozen=True)
class RolloutData:
    """Training data of a method that samples: a dataset's prompts; implements `TrainingData`."""

    config: TrainConfig
    context: StageContext
    options: RolloutOptions
    model: ModelFacts
    prompts: Sequence[RenderedPrompt]
    build_reference: Callable[[torch.device, RolloutData], Engine]
    """Function that builds a second engine for the reference model, which is the model that training starts from."""
    held_out: Sequence[RenderedPrompt] = ()

    @classmethod
    def read(
        cls,
        config: TrainConfig,
        context: StageContext,
        options: RolloutOptions,
        model: ModelFacts,
        build_reference: Callable[[torch.device, RolloutData], Engine],
    ) -> RolloutData:
        """Read the dataset's prompts; raise DataError for rows that are none or leave no room to answer."""
        prompts, *held_out = (
            checked_prompts(config, context.inputs, model, portion=portion) for portion in portions(config.data)
        )
        check_media(config, media_kinds([*prompts, *chain(*held_out)]))
        asked = [] if context.trial else [*chain(*held_out)]
        return cls(config, context, options, model, prompts, build_reference, asked)

    @property
    def longest_document(self) -> int:
        if self.options.acts:
            return most_tokens(self.config, self.options, self.model)
        return max(len(one.token_ids) for one in (*self.prompts, *self.held_out)) + self.options.max_completion_length

    @property
    def has_media(self) -> bool:
        return any(one.pictures for one in (*self.prompts, *self.held_out))

    @cached_property
    def processor(self) -> MediaProcessor | None:
        """Processor of the prompts' pictures; None if they have none."""
        if not self.has_media:
            return None
        return MediaProcessor(self.model.folder, trust_remote_code=self.config.trust_remote_code)

    @property
    def conversations(self) -> bool:
        return isinstance(self.prompts[0].prompt.document, Conversation)

    @property
    def tool_prompts(self) -> tuple[ToolPrompt, ...]:
        documents = [(asked.prompt.document, asked.token_ids) for asked in self.prompts]
        with_tools = [(chat, ids) for chat, ids in documents if isinstance(chat, Conversation) and chat.tools]
        seen = [one for one in self.prompts if one.pictures]
        if not with_tools and not seen:
            return ()
        tokenizer = DocumentTokenizer(self.model.folder, self.config.data.chat_template, "assistant")
        prompts = (tokenizer.tool_prompt(chat, ids) for chat, ids in with_tools)
        return (*islice(filter(None, prompts), 1), *islice(_shown(tokenizer, seen), MOST_PROMPTS))

    @property
    def counts(self) -> dict[str, float]:
        num_media = sum(len(one.pictures.media) for one in self.prompts if one.pictures)
        numbers = {"num_held_out_prompts": len(self.held_out), "num_media": num_media}
        sizes = {f"num_prompts.{name}": size for name, size in self.sizes.items() if name}
        numbers = {"num_prompts": len(self.prompts), **sizes, **{name: one for name, one in numbers.items() if one}}
        return {name: float(one) for name, one in numbers.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Number of prompts to train on in each environment, by its name."""
        return dict(Counter(one.environment for one in self.prompts))  # in their order

    @property
    def lengths(self) -> None:
        return None

    @property
    def row_media(self) -> tuple[RowMedia, ...]:
        """Patches of packed completions: at most those of a row that the densest prompt fills."""
        if self.processor is None:
            return ()
        row, length = self.config.data.sequence_length, self.options.max_completion_length
        seen = [
            (one, [self.processor.num_patches(medium.size) for medium in one.pictures.media])
            for one in self.prompts
            if one.pictures
        ]
        fill = row if self.config.data.packing else 1
        most = max(sum(patches) * max(1, fill // (len(one.token_ids) + 1)) for one, patches in seen)
        total = sum(sum(patches) for _, patches in seen)
        num_rows = sum((len(one.token_ids) + length) / row for one in self.prompts) if fill > 1 else len(self.prompts)
        return (RowMedia(most, total / num_rows, total / sum(len(patches) for _, patches in seen)),)

    @property
    def media(self) -> frozenset[MediaReference]:
        return frozenset(medium for one in self.prompts if one.pictures for medium in one.pictures.media)

    @property
    def steps_of_epochs(self) -> int:
        plan = self.plan
        return math.ceil(self.config.epochs * len(self.prompts) / plan.prompts_per_round) * plan.steps_per_round

    def with_teacher(self, build: BuildEngine, watchdog: Watchdog, teacher_lifetime: ExitStack) -> RolloutData:
        return self

    def batches(self, engine: Engine, last_step: int, watchdog: Watchdog) -> RolloutBatches:
        config = self.config
        packing = completion_packing(config, self.options, self.model, self.processor)
        server = SyncedServer(
            config, self.context, self.options, self.model, engine=engine, watchdog=watchdog, packing=packing
        )
        reference = self.build_reference(engine.device, self) if config.needs_reference else None
        return RolloutBatches(self, engine, watchdog, server, reference, last_step=last_step)

    @property
    def plan(self) -> RoundPlan:
        """Plan of the sampling rounds: which steps learn from each round, and which prompts are sampled in it."""
        config, options = self.config, self.options
        # global_batch_size counts completions, of which each prompt has num_generations
        per_round = config.global_batch_size * options.steps_per_generation // options.num_generations
        weights = tuple(config.acting[name].weight for name in self.sizes)
        return RoundPlan(tuple(self.sizes.values()), per_round, options, config.seed, weights)


def _shown(tokenizer: DocumentTokenizer, prompts: Sequence[RenderedPrompt]) -> Iterator[ToolPrompt]:
    """Yield prompts with pictures, of few bytes in all, by which a server shows that it renders them as training."""
    left = MOST_PICTURE_BYTES
    for one in prompts:
        document = one.prompt.document
        assert one.pictures and isinstance(document, Conversation)
        pictures = [as_png_address(image) for image in one.pictures.images()]
        prompt = tokenizer.tool_prompt(document, one.token_ids)
        if prompt and (num_bytes := sum(map(len, pictures))) <= left:
            left -= num_bytes
            yield prompt.model_copy(update={"pictures": pictures})
