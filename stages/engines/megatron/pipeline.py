"""Forward and backward passes of micro-batches through the model's chunks, by Megatron's pipeline schedules.

Every process of a share of the global batch gets the same micro-batches and takes its part of each. The caller's
function for the log-probabilities is called on the last stage.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from stages.data.batch import IGNORED, Batch, ModelInputs, Signal
from stages.engines.documents import PackedDocuments
from stages.engines.log_probabilities import LogitsTransform, OutputHead, tempered, token_log_probabilities
from stages.engines.megatron.attention import PackedTokens
from stages.engines.megatron.clock import PipelineClock
from stages.engines.megatron.expert_choices import ExpertChoices
from stages.engines.megatron.model import output_weight
from stages.engines.megatron.tokens import TokenSplit, gather_tokens, padded_size, split_tokens
from stages.parallel.layout import Layout

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of a dtype's tensor and positions [1, tokens]: cosines and sines [1, tokens, width] of rotary angles."""

FP8_ROWS = 16
"""Number that must divide the tokens of a process for matrix products in 8 bits."""

OfHidden = Callable[[Tensor, OutputHead, Tensor, Tensor], Tensor]
"""Function of `stages.engines.log_probabilities` from hidden states to values of tokens, [rows, tokens, …].

Its arguments are the last hidden states, this rank's share of the head, wanted tokens and positions of targets."""

Consumer = Callable[[Tensor, Signal], tuple[Tensor, Tensor]]
"""Function of a micro-batch's log-probabilities and signal: a value to differentiate, and a result to keep."""


@dataclass(frozen=True)
class Pipeline:
    """Runner of this process's model chunks in Megatron's pipeline schedule."""

    chunks: Sequence[nn.Module]
    layout: Layout
    rotary: Rotary
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    clock: PipelineClock | None
    """Timer of pipeline schedules in training steps; None if steps are not timed."""
    choices: ExpertChoices | None = None
    """Choices of experts, where they are recorded and replayed."""

    def run(
        self,
        micro_batches: Sequence[Batch],
        consume: Consumer,
        *,
        backward: bool,
        of_hidden: OfHidden = token_log_probabilities,
    ) -> list[Tensor]:
        """Run micro-batches forward and optionally backward (gradients are summed); return one result for each.

        The list is empty except on the last pipeline stage.
        """
        batches = _filled_up(micro_batches, self.layout)
        transformer = get_model_config(self.chunks[0])
        transformer.timers = self.clock if backward else None
        # Sequence parallelism cuts a rank's tokens over `tp`; products in 8 bits want 16 tokens on each.
        divisor = (self.layout.tp if self.layout.sequence_parallel else 1) * (FP8_ROWS if transformer.fp8 else 1)
        size = padded_size(batches, self.layout.cp, divisor)
        for chunk in self.chunks:
            chunk.train(backward)
        # One for each chunk: an interleaved schedule asks each chunk for every micro-batch.
        iterators = [iter(batches) for _ in self.chunks]
        with torch.set_grad_enabled(backward):
            results = get_forward_backward_func()(
                forward_step_func=partial(self._forward, of_hidden, consume, size),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=list(self.chunks) if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(batches),
                seq_length=size,
                micro_batch_size=1,
                forward_only=not backward,
            )
        return results[: len(micro_batches)]  # without the empty ones

    def _forward(
        self, of_hidden: OfHidden, consume: Consumer, size: int, batches: Iterator[Batch], chunk: nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
        """Run one micro-batch through one model chunk; called by Megatron's schedules."""
        on_host = next(batches)
        split = split_tokens(on_host, self.layout.cp, size).to(self.device)
        batch = on_host.to(self.device)
        rank = parallel_state.get_context_parallel_rank()
        if self.choices:
            self.choices.begin(batch.inputs.experts, size)
        # On later stages Megatron sets the chunk's input to the tensor received; `input_ids` are then unused.
        output = chunk(
            input_ids=split.local(batch.inputs.input_ids, rank, padding=0),
            position_ids=None,
            attention_mask=None,
            packed_seq_params=self._packed_tokens(batch.inputs, split, rank),
        )
        return output, partial(self._finish, of_hidden, consume, batch, split)

    def _packed_tokens(self, inputs: ModelInputs, split: TokenSplit, rank: int) -> PackedTokens:
        # For dtype and device alone, which Transformers' module takes from it.
        like = torch.empty((), dtype=self.dtype, device=self.device)
        cosines, sines = self.rotary(like, split.positions[rank].unsqueeze(0))
        return PackedTokens(
            documents=PackedDocuments(
                split.lengths, self.device, queries=split.places[rank] if self.layout.cp > 1 else None
            ),
            cosines=cosines,
            sines=sines,
            places=split.places,
            rows=split.local(inputs.documents.token_rows, rank, padding=-1).squeeze(0),
            num_rows=len(inputs.input_ids),
        )

    def _finish(
        self, of_hidden: OfHidden, consume: Consumer, batch: Batch, split: TokenSplit, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Return a micro-batch's loss, an unused token count and its result, as Megatron's schedules expect.

        hidden: last hidden states, [1, tokens of this context-parallel rank, width].
        """
        group = parallel_state.get_context_parallel_group()
        signal = batch.signal
        wanted = split.local(signal.wanted, group.rank(), padding=IGNORED)
        head = OutputHead(
            output_weight(self.chunks[-1].module),
            transform=tempered(LogitsTransform(), signal.temperature),
            group=parallel_state.get_tensor_model_parallel_group() if self.layout.tp > 1 else None,
            vocab_size=self.vocab_size,
        )
        local = of_hidden(hidden, head, wanted, split.target_positions[group.rank()])
        values = gather_tokens(local, split, group).unflatten(0, batch.inputs.input_ids.shape)
        # [rows, sequence, number], the same on every context-parallel rank
        differentiated, result = consume(values.squeeze(-1), signal)
        # The token count is ignored (`_finalize_gradients`): losses come divided by the counts of the global batch.
        return differentiated, torch.zeros((), dtype=torch.int, device=self.device), result


def _filled_up(micro_batches: Sequence[Batch], layout: Layout) -> list[Batch]:
    """Add empty micro-batches up to a multiple of `pp`, which the interleaved pipeline schedule needs."""
    batches = list(micro_batches)
    missing = -len(batches) % layout.pp if layout.vpp > 1 else 0  # 5 micro-batches, pp 4 -> 3
    return batches + [_without_documents(batches[-1])] * missing


def _without_documents(batch: Batch) -> Batch:
    signal, documents = batch.signal, replace(batch.documents, count=0)
    reference, is_good, margins = signal.reference_log_probabilities, signal.is_good, signal.margins
    empty = replace(
        signal,
        documents=documents,
        targets=torch.full_like(signal.targets, IGNORED),
        reference_log_probabilities=None if reference is None else reference[:0],
        is_good=None if is_good is None else is_good[:0],
        margins=None if margins is None else margins[:0],
        rollouts=None if signal.rollouts is None else signal.rollouts.without_documents(),
    )
    return Batch(replace(batch.inputs, documents=documents), empty)
