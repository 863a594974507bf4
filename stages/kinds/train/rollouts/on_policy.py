"""Rows in some steps, and in the others what the model itself answers to their prompts, with what a teacher says of it.

As in TRL's GKD (Agarwal et al. 2024, algorithm 1), a draw for each step decides which. The server that samples has the
weights of that very step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from stages.core.contract import StageContext, is_main_process
from stages.core.errors import DataError
from stages.core.files import write_atomically
from stages.data.batch import Batch
from stages.data.dataset import PackedDataset
from stages.data.tokenizer import DocumentTokenizer
from stages.engines.engine import Engine
from stages.kinds.train.batches import BatchSource, RowBatches
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.method import OnPolicySteps, TeacherTokens
from stages.kinds.train.methods.rollouts import SamplingOptions
from stages.kinds.train.rollouts.documents import AnsweredPrompt, Packing, completion_packing
from stages.kinds.train.rollouts.metrics import COMPLETIONS_FILE, NUM_SHOWN, SampleFile
from stages.kinds.train.rollouts.rounds import CUT_OFF, SERVER, completion_request
from stages.kinds.train.rollouts.server import SyncedServer
from stages.kinds.train.teacher import Taught, with_candidates
from stages.kinds.train.watchdog import Watchdog
from stages.rollouts.asking import Answer, Request
from stages.serving.client import Choice

DOCUMENTS = TypeAdapter(list[AnsweredPrompt])


@dataclass
class OnPolicyBatches:
    """See `stages.kinds.train.batches.Batches`. To be closed: it has a server."""

    made_ahead: ClassVar[bool] = False
    steps_together: ClassVar[int] = 1
    files: ClassVar[Sequence[str]] = (COMPLETIONS_FILE,)

    texts: RowBatches
    steps: OnPolicySteps
    asked: TeacherTokens
    taught: Taught
    engine: Engine
    server: SyncedServer
    packing: Packing
    seed: int
    file: Path
    """Where rank 0 writes the answers, and every process reads them."""
    watchdog: Watchdog
    samples: SampleFile | None
    """Of rank 0."""
    decode: Callable[[Sequence[int]], str]
    """Tokens → text."""
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def held_out(self) -> BatchSource | None:
        return self.texts.held_out

    def micro_batches(self, step: int) -> list[Batch]:
        if not is_on_policy(self.seed, step, self.steps.share):
            self.measured = {"on_policy": 0.0}
            return self.texts.micro_batches(step)
        sync_s = self.server.give_weights(step)
        began_s = time.perf_counter()
        documents = self._answered(step)
        sampled_s = time.perf_counter()
        if not self.server.has_probe:
            self.server.take_probe(documents)
            self.server.check(step)
        self.watchdog.begins(f"what the teacher says of the answers of step {step}")
        batches = self._taught(documents)
        self.measured = {
            "on_policy": 1.0,
            "sync_s": sync_s,
            "generate_s": sampled_s - began_s,
            "teacher_s": time.perf_counter() - sampled_s,
            "completion_tokens": float(np.mean([len(one.completion) for one in documents])),
        }
        self.watchdog.begins_step(step)
        return batches

    def metrics(self, step: int, update_s: float) -> dict[str, float]:
        return {**self.texts.metrics(step, update_s), **self.measured}

    def recorded(self) -> tuple[Batch, torch.Tensor | None]:
        return self.texts.recorded()

    def close(self) -> None:
        self.server.close()

    def _answered(self, step: int) -> list[AnsweredPrompt]:
        """By all of the global batch, the same on every process."""
        self.watchdog.begins(f"the answers of step {step}")
        if is_main_process():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, DOCUMENTS.dump_json(self._sample(step)).decode())
        self.engine.broadcast_from_rank0(0.0)  # until now, the file may be that of an earlier step
        documents = DOCUMENTS.validate_json(self.file.read_bytes())
        self.engine.broadcast_from_rank0(0.0)
        return documents

    def _sample(self, step: int) -> list[AnsweredPrompt]:
        prompts = prompts_of(self.texts.training.dataset, self.texts.order.global_batch(step))
        requests = requests_of(self.steps.sampling, prompts, self.packing.most_tokens, self.seed, step)
        found: dict[int, tuple[AnsweredPrompt, Choice]] = {}

        def keep(position: int, request: Request, answer: Answer) -> None:
            choice = answer.choices[0]
            found[position] = AnsweredPrompt(request["prompt"], *choice.sampled(SERVER), 0.0), choice

        self.server.server.ask(requests, keep)
        assert self.samples
        self.samples.write(step, self._shown(found))
        return [found[position][0] for position in range(len(prompts))]

    def _taught(self, documents: Sequence[AnsweredPrompt]) -> list[Batch]:
        """This process's share."""
        assert self.taught.teacher
        data_rank, num_shares = self.engine.data_rank, self.engine.data_parallel_size
        share_of = partial(self._share, documents)
        said = self.taught.teacher.of_share(share_of, data_rank, num_shares)
        return [
            with_candidates(batch, one, self.asked, self.taught.is_whole_vocabulary)
            for batch, one in zip(share_of(data_rank), said, strict=True)
        ]

    def _share(self, documents: Sequence[AnsweredPrompt], data_rank: int) -> list[Batch]:
        """At the temperature of the loss."""
        batches = self.packing.share(documents, data_rank, self.engine.data_parallel_size)
        return [replace(batch, rollouts=None, temperature=self.asked.temperature) for batch in batches]

    def _shown(self, found: Mapping[int, tuple[AnsweredPrompt, Choice]]) -> Iterator[dict[str, object]]:
        for position in range(min(NUM_SHOWN, len(found))):
            document, choice = found[position]
            yield {
                "prompt": self.decode(document.prompt),
                "text": choice.written(SERVER),
                "num_tokens": len(document.completion),
                "truncated": choice.finish_reason == CUT_OFF,
            }


def on_policy_batches(
    config: TrainConfig,
    context: StageContext,
    steps: OnPolicySteps,
    engine: Engine,
    watchdog: Watchdog,
    texts: RowBatches,
    taught: Taught,
) -> OnPolicyBatches:
    """texts: what the other steps learn from. The server is opened with the first weights that it is given."""
    asked = config.teacher_tokens
    assert asked
    check_prompts(texts.training.dataset)
    model_folder = context.inputs[config.base or config.model] / "model"
    packing = completion_packing(config, steps.sampling, model_folder, steps.sampling.temperature)
    server = SyncedServer(config, context, steps.sampling, engine, watchdog, packing, model_folder)
    file = context.scratch / "rollouts" / "answers.json"
    samples = SampleFile(context) if is_main_process() else None
    decode = DocumentTokenizer(model_folder, None, "assistant").decode
    return OnPolicyBatches(
        texts, steps, asked, taught, engine, server, packing, config.seed, file, watchdog, samples, decode
    )


def requests_of(
    sampling: SamplingOptions, prompts: Sequence[list[int]], most_tokens: int, seed: int, step: int
) -> list[tuple[int, Request]]:
    """One for each prompt, with its position: the same again for a run that goes on before this step.

    most_tokens: of a prompt and its answer. Raises DataError for a prompt that leaves no room for one.
    """
    requests: list[tuple[int, Request]] = []
    for position, prompt in enumerate(prompts):
        own_seed = int(np.random.SeedSequence((seed, step, position)).generate_state(1)[0]) >> 1
        room = most_tokens - len(prompt)
        if room < 1:
            raise DataError(
                f"step {step}: a prompt of {len(prompt)} tokens leaves no room for an answer in the {most_tokens} "
                "that the model, sequence_length and sampling.serving.max_model_len allow together; raise these, "
                "or leave such rows out"
            )
        request = completion_request(sampling, prompt, own_seed, 1)
        requests.append((position, {**request, "max_tokens": min(room, sampling.max_completion_length)}))
    return requests


def is_on_policy(seed: int, step: int, share: float) -> bool:
    """Whether the model answers the rows of this step itself: a draw that a resumed run repeats."""
    return bool(np.random.default_rng([seed, step, 1]).random() < share)


def prompts_of(dataset: PackedDataset, rows: Sequence[int]) -> list[list[int]]:
    """Of every document of these rows of which something is learned, the tokens before its last answer."""
    documents = (one for row in rows for one in dataset.documents(row))
    return [tokens[: _prompt_length(loss)].tolist() for tokens, loss in documents if loss[1:].any()]


def check_prompts(dataset: PackedDataset) -> None:
    """Raises DataError for texts of which all is learned but the first token, which has nothing to be predicted from.

    The first row of each dataset shows it: its documents are of one kind.
    """
    for name, rows in dataset.member_rows.items():
        if max(map(len, prompts_of(dataset, [rows.start])), default=0) <= 1:
            raise DataError(
                f"the rows{f' of {name}' if name else ''} have no prompts that the model could answer (`lmbda`): all "
                "of them is learned; expected prompts and answers, or conversations"
            )


def _prompt_length(loss: NDArray[np.bool_]) -> int:
    """Tokens before the last run of learned ones."""
    last = np.flatnonzero(loss[1:])[-1] + 1
    return int(np.flatnonzero(~loss[1:last])[-1]) + 2 if not loss[1:last].all() else 1
