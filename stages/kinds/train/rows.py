"""Training data made of dataset rows: prepared, checked and distributed over the processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, count, islice

from stages.core.contract import StageContext
from stages.core.errors import DataError
from stages.data.batch import Batch
from stages.data.dataset import PackedDataset
from stages.data.media_reference import MediaReference
from stages.data.prepare import PreparedData, prepare_mixture
from stages.data.summaries import Lengths, count_lengths
from stages.engines.engine import Engine
from stages.kinds.train.batches import Batches, BatchSource, RowBatches, first_batches
from stages.kinds.train.check_model import InputModels
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.media import check_media
from stages.kinds.train.order import DataOrder, repeated_too_often, shares_asked, slots_of, steps_of_epochs
from stages.kinds.train.reference import ReferenceModel, model_digest
from stages.kinds.train.teacher import BuildEngine, RowsOf, TeacherTargets, ask_teacher
from stages.kinds.train.watchdog import Watchdog
from stages.models.flops import ModelFlops
from stages.models.media import KINDS, MediaKind
from stages.models.recorded import ToolPrompt
from stages.planner.workload import RowMedia

NOTHING_TAUGHT = TeacherTargets()


@dataclass(frozen=True)
class RowData:
    """Training data made of a dataset's or a mixture's rows; implements `stages.kinds.train.batches.TrainingData`."""

    config: TrainConfig
    context: StageContext
    models: InputModels
    prepared: PreparedData
    teaching: TeacherTargets = NOTHING_TAUGHT

    @classmethod
    def read(cls, config: TrainConfig, context: StageContext, models: InputModels) -> RowData:
        """Prepare (tokenize and pack) the recipe's datasets for training, or reuse prepared ones.

        Raises as `prepare_mixture` does, and DataError if a dataset would exceed its `max_epochs`.
        """
        prepared = prepare_mixture(
            context.inputs,
            config.data,
            models.start,
            rows=config.learning.rows,
            cache=context.cache,
            report=context,
            work=context.work,
        )
        if prepared.training.about.has_margins and not config.learning.reads_margins:
            context.warn(f"the rows have a `margin`, which `method: {config.method}` does not use")
        for place, error in repeated_too_often(config, prepared.training):
            raise DataError(f"data.{place}: {error}")
        check_media(config, prepared.media_kinds)
        if prepared.has_media:
            _see(prepared, models, trust_remote_code=config.trust_remote_code)
        return cls(config, context, models, prepared)

    @property
    def longest_document(self) -> int:
        return self.prepared.longest_document

    @property
    def has_media(self) -> bool:
        return self.prepared.has_media

    @property
    def media_kinds(self) -> Sequence[MediaKind]:
        """Kinds of the rows' media, in the order of `KINDS`."""
        return [kind for kind in KINDS if kind in self.prepared.media_kinds]

    @property
    def conversations(self) -> bool:
        return self.prepared.training.about.conversations

    @property
    def tool_prompts(self) -> tuple[ToolPrompt, ...]:
        return self.prepared.training.prompts

    @property
    def counts(self) -> dict[str, float]:
        training = self.prepared.training
        return {
            "num_rows": float(len(training)),
            "num_documents": float(training.num_documents),
            "num_tokens": float(training.num_tokens),
            "num_target_tokens": float(training.num_target_tokens),
            **({"num_media": float(training.about.num_media)} if training.has_media else {}),
            **({} if training.padding_fraction is None else {"padding_fraction": training.padding_fraction}),
            **self._counts_by_dataset,
        }

    @property
    def media(self) -> frozenset[MediaReference]:
        return self.prepared.training.distinct_media

    @property
    def lengths(self) -> Lengths:
        training = self.prepared.training
        members = training.members or {"": training}
        return count_lengths({name: one.document_lengths for name, one in members.items()})

    @property
    def row_media(self) -> tuple[RowMedia, ...]:
        about, media = self.prepared.training.about, []
        if about.num_patches:
            number = about.num_frames or about.num_media  # rows that were prepared before have no frames counted
            media.append(RowMedia(about.most_patches, about.num_patches / about.num_rows, about.num_patches / number))
        if about.num_sounds:
            total = about.num_sound_frames
            of_row = total / about.num_rows
            media.append(RowMedia(about.most_sound_frames, of_row, total / about.num_sounds, "audio_tower"))
        return tuple(media)

    @property
    def _counts_by_dataset(self) -> dict[str, float]:
        """Count rows and tokens of each dataset of a mixture, and add the share that the recipe asks for."""
        training = self.prepared.training
        asked = shares_asked(self.config.data, training) if training.members else {}
        counts: dict[str, float] = {}
        for name, dataset in training.members.items():
            counts |= {f"num_rows.{name}": float(len(dataset)), f"num_tokens.{name}": float(dataset.num_tokens)}
            counts[f"share_asked.{name}"] = asked[name]
        return counts

    @property
    def steps_of_epochs(self) -> int:
        return steps_of_epochs(self.config, self.prepared.training)

    def with_teacher(self, build: BuildEngine, watchdog: Watchdog, teacher_lifetime: ExitStack) -> RowData:
        """Return the data with the teacher's likeliest tokens at the targets of all training and held-out rows.

        Training rows are left out where the model itself answers in every step.
        """
        config, context = self.config, self.context
        if not config.teacher_tokens:
            return self
        last_step = context.trial.steps if context.trial else config.steps or self.steps_of_epochs
        asked_rows: list[RowsOf] = []
        if config.on_policy is None or config.on_policy.share < 1:
            # rank 0 of 1: the rows of all processes, since the teacher's file is of the whole data
            asked_rows.append((self.prepared.training, self._order(0, 1).rows(last_step)))
        if self._held_out:
            asked_rows.append((self._held_out, range(len(self._held_out))))
        digest = _start_digest(config, context)
        teaching = ask_teacher(
            config,
            context,
            self.models,
            asked_rows,
            start_digest=digest,
            watchdog=watchdog,
            build=build,
            teacher_lifetime=teacher_lifetime,
        )
        return replace(self, teaching=teaching)

    def first_batches(self, least_targets: int) -> list[Batch]:
        """Return the first micro-batches for EVA, equal on all processes; raises as the function of this name does."""
        training, order = self.prepared.training, self._order(0, 1)  # whole global batches, whatever the layout
        rows = chain.from_iterable(map(order.global_batch, count(1)))
        return first_batches(training, islice(rows, len(training)), least_targets)

    def batches(self, engine: Engine, last_step: int, watchdog: Watchdog) -> Batches:
        """Return this process's micro-batches of the rows up to `last_step`; reference log-probabilities come first."""
        config, context, training = self.config, self.context, self.prepared.training
        micro_batch_size = config.layout.micro_batch_size
        order = self._order(engine.data_rank, engine.data_parallel_size)
        if training.has_media:
            order = replace(order, cost=lambda row: self._cost(row, engine.flops))
        reference = (
            ReferenceModel(engine, _start_digest(config, context), micro_batch_size, context, watchdog)
            if config.needs_reference
            else None
        )
        change = config.learning.batch_change(config.method_options)

        def source(dataset: PackedDataset, rows: list[int]) -> BatchSource:
            found = reference.rows(dataset, rows, change) if reference else None
            other = reference.rows(dataset, rows, mismatched=True) if reference and config.needs_divergence else None
            return BatchSource(dataset, micro_batch_size, change, found, other, self.teaching.rows.get(dataset))

        held_out = self._held_out
        batches = RowBatches(
            order=order,
            training=source(training, order.rows(last_step)),
            held_out=source(held_out, list(range(len(held_out)))) if held_out else None,
            data=config.data,
        )
        # Predictions before training are needed for adapters only: `run` refuses one that changed nothing.
        if config.adapter and not context.trial:
            recorded = batches.recorded().batch
            untrained = engine.target_log_probabilities(recorded)[recorded.signal.has_target]
            batches = replace(batches, untrained=untrained)
        if config.on_policy is None:
            return batches
        from stages.kinds.train.rollouts.on_policy import on_policy_batches

        return on_policy_batches(
            config,
            context,
            self.models.start,
            engine=engine,
            watchdog=watchdog,
            texts=batches,
            teacher_targets=self.teaching,
        )

    def _cost(self, row: int, flops: ModelFlops) -> float:
        """Return the FLOPs of training on a row, with those of its pictures, whose sizes the prepared rows have."""
        training = self.prepared.training
        lengths = [len(ids) for ids, _ in training.documents(row)]
        return flops.training(lengths, int(training.num_row_targets([row])[0]), training.patches(row))

    @property
    def _held_out(self) -> PackedDataset | None:
        return None if self.context.trial else self.prepared.evaluation

    def _order(self, data_rank: int, data_parallel_size: int) -> DataOrder:
        config, training = self.config, self.prepared.training
        return DataOrder(
            num_rows=len(training),
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.layout.micro_batch_size,
            data_rank=data_rank,
            data_parallel_size=data_parallel_size,
            seed=config.seed,
            mixture=slots_of(config.data, training, config.seed),
        )


def _see(prepared: PreparedData, models: InputModels, *, trust_remote_code: bool) -> None:
    """Put the pictures of documents into all batches, as the model takes them: also where a batch has none.

    Raises ModelError for a teacher that would take them in another way.
    """
    from stages.engines.media import with_media
    from stages.models.processor import MediaProcessor

    processor = MediaProcessor(models.start.folder, trust_remote_code=trust_remote_code)
    if models.teacher:
        processor.check_sees_alike(models.teacher.folder, prepared.media_kinds)
    for dataset in prepared.datasets:
        dataset.seen_by(lambda batch, pictures: with_media(batch, pictures, processor), processor)


def _start_digest(config: TrainConfig, context: StageContext) -> str:
    """Return a digest of the weights that training starts from, to cache the reference's log-probabilities by."""
    start = [context.inputs[config.model] / "adapter"] if config.base else []
    precision = config.adapter and config.adapter.base_precision
    digest = model_digest(context.inputs[config.base or config.model] / "model", *start)
    # A base in fewer bits, and what an init takes out of it, is another reference model than the one on disk.
    return f"{digest} {precision} {config.adapter.init}" if config.adapter and precision else digest
