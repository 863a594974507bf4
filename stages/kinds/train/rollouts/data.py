"""Prompts as what a run learns from: read and checked like the rows of any dataset, answered while it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from stages.core.contract import StageContext
from stages.data.messages import Conversation
from stages.data.summaries import ToolPrompt
from stages.data.tokenizer import DocumentTokenizer
from stages.engines.engine import Engine
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.rollouts import RolloutOptions
from stages.kinds.train.rollouts.batches import RolloutBatches
from stages.kinds.train.rollouts.prompts import checked_prompts, completion_packing
from stages.kinds.train.rollouts.rounds import RoundPlan
from stages.kinds.train.rollouts.synced import SyncedServer
from stages.kinds.train.teacher import BuildEngine
from stages.kinds.train.watchdog import Watchdog
from stages.rollouts.prompts import AskedPrompt


@dataclass(frozen=True)
class RolloutData:
    """See `stages.kinds.train.batches.TrainingData`."""

    config: TrainConfig
    context: StageContext
    options: RolloutOptions
    model_folder: Path
    prompts: Sequence[AskedPrompt]
    build_reference: Callable[[torch.device, RolloutData], Engine]
    """The model that training starts from, once more."""

    @classmethod
    def read(
        cls,
        config: TrainConfig,
        context: StageContext,
        options: RolloutOptions,
        model_folder: Path,
        build_reference: Callable[[torch.device, RolloutData], Engine],
    ) -> RolloutData:
        """Raises DataError for rows that are no prompts, or are too long; ModelError as `read_prompts` does."""
        prompts = checked_prompts(config, options, context.inputs[config.data.dataset_stage] / "data", model_folder)
        return cls(config, context, options, model_folder, prompts, build_reference)

    @property
    def longest_document(self) -> int:
        return max(len(one.token_ids) for one in self.prompts) + self.options.max_completion_length

    @property
    def conversations(self) -> bool:
        return isinstance(self.prompts[0].prompt.document, Conversation)

    @property
    def tool_prompts(self) -> tuple[ToolPrompt, ...]:
        documents = [(one.prompt.document, one.token_ids) for one in self.prompts]
        asked = [(one, ids) for one, ids in documents if isinstance(one, Conversation) and one.tools]
        if not asked:
            return ()
        tokenizer = DocumentTokenizer(self.model_folder, self.config.data.chat_template, "assistant")
        prompts = (tokenizer.tool_prompt(one, ids) for one, ids in asked)
        return tuple(islice(filter(None, prompts), 1))

    @property
    def counts(self) -> dict[str, float]:
        return {"num_prompts": float(len(self.prompts))}

    @property
    def lengths(self) -> None:
        return None

    @property
    def steps_of_epochs(self) -> int:
        plan = self._plan
        return math.ceil(self.config.epochs * len(self.prompts) / plan.prompts_per_round) * plan.steps_per_round

    def taught(self, build: BuildEngine, watchdog: Watchdog, stays: ExitStack) -> RolloutData:
        """No method has a teacher for what a model answers itself."""
        return self

    def batches(self, engine: Engine, last_step: int, watchdog: Watchdog) -> RolloutBatches:
        """The server is opened with the first of them."""
        config = self.config
        packing = completion_packing(config, self.options, self.model_folder, self.options.temperature)
        server = SyncedServer(config, self.context, self.options, engine, watchdog, packing, self.model_folder)
        reference = self.build_reference(engine.device, self) if config.needs_reference else None
        return RolloutBatches(
            self.context, self.options, engine, watchdog, self.prompts, self._plan, packing, server, reference
        )

    @property
    def _plan(self) -> RoundPlan:
        config, options = self.config, self.options
        per_round = config.global_batch_size * options.steps_per_generation // options.num_generations
        return RoundPlan(len(self.prompts), per_round, options, config.seed)
