"""On-policy distillation: in some training steps the model answers the rows' prompts and a teacher scores the answers.

As in TRL's GKD (Agarwal et al. 2024, algorithm 1), a random draw for each step decides; the server has its weights.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stages.core.contract import StageContext, is_main_process
from stages.core.errors import DataError
from stages.core.files import write_atomically
from stages.core.lines import counted
from stages.data.batch import Batch
from stages.data.dataset import PackedDataset
from stages.data.tokenizer import DocumentTokenizer
from stages.engines.engine import Engine
from stages.engines.recorded import RecordedBatch
from stages.kinds.train.batches import BatchSource, RowBatches
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.method import OnPolicySteps, TeacherTokens
from stages.kinds.train.rollouts.documents import DOCUMENTS, AnsweredPrompt, completion_packing
from stages.kinds.train.rollouts.metrics import COMPLETIONS_FILE, NUM_SHOWN, SampleFile
from stages.kinds.train.rollouts.rounds import PromptRequest, sample_completions
from stages.kinds.train.rollouts.server import PolicyServer
from stages.kinds.train.rollouts.synced import SyncedServer
from stages.kinds.train.teacher import TeacherTargets, with_candidates
from stages.kinds.train.watchdog import Watchdog
from stages.models.facts import ModelFacts
from stages.models.processor import MediaProcessor
from stages.rollouts.asking import request_seed
from stages.rollouts.pictures import PromptPictures


@dataclass
class OnPolicyBatches:
    """Batches of on-policy distillation: dataset rows or the model's answers, by step; the caller closes it."""

    made_ahead: ClassVar[bool] = False
    steps_together: ClassVar[int] = 1
    files: ClassVar[Sequence[str]] = (COMPLETIONS_FILE,)

    texts: RowBatches
    steps: OnPolicySteps
    asked: TeacherTokens
    teacher_targets: TeacherTargets
    engine: Engine
    server: SyncedServer
    seed: int
    file: Path
    """File of sampled answers, which rank 0 writes and every process reads."""
    watchdog: Watchdog
    samples: SampleFile | None
    """File of sampled answers for people to read; None except on process rank 0."""
    decode: Callable[[Sequence[int]], str]
    """Function that decodes token ids to text, for the file of sampled answers."""
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def held_out(self) -> BatchSource | None:
        return self.texts.held_out

    def micro_batches(self, step: int) -> list[Batch]:
        if not is_on_policy(self.seed, step, self.steps.share):
            self.measured = {"on_policy": 0.0}
            return self.texts.micro_batches(step)
        began_s = time.perf_counter()
        sync_s = self.server.sample(f"step {step}", partial(self._write_answers, step))
        documents = DOCUMENTS.validate_json(self.file.read_bytes())
        self.engine.broadcast_from_rank0(0.0)  # rank 0 overwrites the file only when all have read it
        sampled_s = time.perf_counter()
        if not self.server.has_probe:
            # There was nothing to compare when the first weights were given, so these are checked now.
            self.server.take_probe(documents)
            self.server.check(f"step {step}")
        self.watchdog.begins(f"the teacher's tokens for the answers of step {step}")
        batches = self._teacher_batches(documents)
        self.measured = {
            "on_policy": 1.0,
            "sync_s": sync_s,
            "generate_s": sampled_s - began_s - sync_s,
            "teacher_s": time.perf_counter() - sampled_s,
            "completion_tokens": float(np.mean([len(one.completion) for one in documents])),
        }
        self.watchdog.begins_step(step)
        return batches

    def metrics(self, step: int, update_s: float) -> dict[str, float]:
        return {**self.texts.metrics(step, update_s), **self.measured}

    def recorded(self) -> RecordedBatch:
        return self.texts.recorded()

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.server.close()

    def _write_answers(self, step: int, server: PolicyServer) -> None:
        """Sample answers to a global batch's prompts on rank 0, and write them to the shared file, some for people."""
        sampling = self.steps.sampling
        dataset, packing = self.texts.training.dataset, self.server.packing
        prompts = prompts_of(dataset, self.texts.order.global_batch(step), packing.processor)
        asked = asked_of(prompts, packing.most_tokens, sampling.max_completion_length, self.seed, step)
        answers = [one for (one,) in sample_completions(server, sampling, asked, 1, packing.media_tokens)]
        documents = [
            answer.after(prompt.tokens, pictures=prompt.pictures)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, DOCUMENTS.dump_json(documents).decode())
        assert self.samples
        shown = zip(prompts[:NUM_SHOWN], answers, strict=False)
        self.samples.write(step, ({"prompt": self.decode(one.tokens), **answer.shown} for one, answer in shown))

    def _teacher_batches(self, documents: Sequence[AnsweredPrompt]) -> list[Batch]:
        """Return this process's micro-batches of the answers, with the teacher's likeliest tokens at each target."""
        assert self.teacher_targets.teacher
        data_rank, num_shares = self.engine.data_rank, self.engine.data_parallel_size
        share_of = partial(self._share, documents)
        records = self.teacher_targets.teacher.of_share(share_of, data_rank, num_shares)
        return [
            with_candidates(batch, of_batch, self.asked, self.teacher_targets.is_whole_vocabulary)
            for batch, of_batch in zip(share_of(data_rank), records, strict=True)
        ]

    def _share(self, documents: Sequence[AnsweredPrompt], data_rank: int) -> list[Batch]:
        """Return a data-parallel rank's micro-batches of answers, with the temperature of the distillation loss."""
        shares = self.server.packing.share(documents, data_rank, self.engine.data_parallel_size)
        return [one.seen().with_signal(rollouts=None, temperature=self.asked.temperature) for one in shares]


def on_policy_batches(
    config: TrainConfig,
    context: StageContext,
    model: ModelFacts,
    *,
    engine: Engine,
    watchdog: Watchdog,
    texts: RowBatches,
    teacher_targets: TeacherTargets,
) -> OnPolicyBatches:
    """Return the batches of on-policy distillation; the server starts with the first weights. texts: of rows."""
    asked, steps = config.teacher_tokens, config.on_policy
    assert asked and steps
    training = texts.training.dataset
    check_prompts(training)
    processor = MediaProcessor(model.folder, trust_remote_code=config.trust_remote_code) if training.has_media else None
    packing = completion_packing(config, steps.sampling, model, processor)
    return OnPolicyBatches(
        texts=texts,
        steps=steps,
        asked=asked,
        teacher_targets=teacher_targets,
        engine=engine,
        server=SyncedServer(config, context, steps.sampling, model, engine=engine, watchdog=watchdog, packing=packing),
        seed=config.seed,
        file=context.scratch / "rollouts" / "answers.json",
        watchdog=watchdog,
        samples=SampleFile(context) if is_main_process() else None,
        decode=DocumentTokenizer(model.folder, None, "assistant").decode,
    )


@dataclass(frozen=True)
class RowPrompt:
    """Prompt of a dataset's document: the tokens before its last answer, and its pictures, if it has some."""

    tokens: list[int]
    pictures: PromptPictures | None = None


def asked_of(
    prompts: Sequence[RowPrompt], most_tokens: int, max_completion_length: int, seed: int, step: int
) -> list[PromptRequest]:
    """Return the prompts to complete in a step, each with a seed and token limit; a resumed run gets the same.

    most_tokens: of a prompt and its answer. Raises DataError for a prompt that leaves no room for an answer.
    """
    asked = []
    for position, prompt in enumerate(prompts):
        room = most_tokens - len(prompt.tokens)
        if room < 1:
            raise DataError(
                f"step {step}: a prompt of {len(prompt.tokens)} tokens leaves no room for an answer in the "
                f"{most_tokens} that the model, sequence_length and sampling.serving.max_model_len allow together; "
                "raise these, or leave such rows out"
            )
        own_seed, length = request_seed(seed, step, position), min(room, max_completion_length)
        asked.append(PromptRequest(prompt.tokens, own_seed, length, prompt.pictures))
    return asked


def is_on_policy(seed: int, step: int, share: float) -> bool:
    """Return whether a step learns from the model's own answers: a random draw that a resumed run repeats."""
    return bool(np.random.default_rng([seed, step, 1]).random() < share)


def prompts_of(dataset: PackedDataset, rows: Sequence[int], processor: MediaProcessor | None = None) -> list[RowPrompt]:
    """Return the prompt of every document in these rows that has targets: what is before its last answer.

    processor: of the pictures; None for text. Raises DataError for a prompt that no server could read as it is.
    """
    prompts = []
    for row in rows:
        for (tokens, loss), media in zip(dataset.documents(row), dataset.media(row), strict=True):
            if loss[1:].any():
                prompt = tokens[: _prompt_length(loss)].tolist()
                folder = dataset.media_folder(row)
                short = processor.collapsed(prompt, [one.size for one in media]) if processor and media else None
                if media and processor and not (short and folder):
                    raise DataError(
                        f"a prompt with {counted(len(media), 'picture')}, of row {row} of the packed ones, has special "
                        "tokens inside of its texts, or pictures after its last answer, so that no server could read "
                        "it as training does; leave such rows out, or say `lmbda: 0`"
                    )
                prompts.append(RowPrompt(prompt, PromptPictures(short, media, folder) if short and folder else None))
    return prompts


def check_prompts(dataset: PackedDataset) -> None:
    """Raise DataError if a dataset's first row has no prompts: all of its tokens but the first are targets."""
    for name, rows in dataset.member_rows.items():
        if max((len(one.tokens) for one in prompts_of(dataset, [rows.start])), default=0) <= 1:
            raise DataError(
                f"the rows{f' of {name}' if name else ''} have no prompts that the model could answer (`lmbda`): all "
                "of them is learned; expected prompts and answers, or conversations"
            )


def _prompt_length(loss: NDArray[np.bool_]) -> int:
    """Return the number of prompt tokens from a document's target mask: those before the last run of targets."""
    # targets 0 0 1 1 0 1 1 -> 5: the last run of targets begins at token 5. The first token is never a target.
    last = np.flatnonzero(loss[1:])[-1] + 1
    return int(np.flatnonzero(~loss[1:last])[-1]) + 2 if not loss[1:last].all() else 1
