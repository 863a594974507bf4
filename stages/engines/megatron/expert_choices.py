"""Choices of experts by Megatron's routers, recorded in one forward pass and replayed in later ones.

As `stages.engines.fsdp.expert_choices` does it for Transformers' code; Megatron's routers have a place for it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor, nn


class ExpertChoices:
    """Choices of the mixture layers that this process has, in the order of its chunks."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        routers: list[Any] = [one for chunk in chunks for one in chunk.modules() if isinstance(one, TopKRouter)]
        for router in routers:
            router.router_replay = RouterReplay()
        RouterReplay.clear_global_router_replay_instances()  # which would keep them alive
        self._replays = [router.router_replay for router in routers]
        self._are_recorded = False

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Record the choices of a forward pass; the yielded function returns them, int32 [layers, tokens, k].

        Layers and tokens are those of this process; it may have none.
        """
        self._are_recorded = True
        try:
            yield self._recorded
        finally:
            self._are_recorded = False

    def _recorded(self) -> Tensor:
        recorded = [one.get_recorded_indices() for one in self._replays]
        for one in self._replays:
            one.clear_indices()
        return torch.stack(recorded).int() if recorded else torch.empty(0, 0, 0, dtype=torch.int32)

    def begin(self, experts: Tensor | None, num_tokens: int) -> None:
        """Begin a micro-batch's forward pass, with given choices, of at most `num_tokens` tokens, if there are any.

        They are also those of layers that are computed again before the next micro-batch's forward pass. A process with
        several chunks begins each: what the chunks before it have recorded stays.
        """
        for layer, replay in enumerate(self._replays):
            replay.target_topk_idx = None
            if experts is None:
                action = RouterReplayAction.RECORD if self._are_recorded else None
            else:
                action = RouterReplayAction.REPLAY_FORWARD
                # Padding, of which there is more beside longer micro-batches, may go to any experts.
                choices = experts[layer].long()
                padding = torch.arange(choices.shape[1], device=choices.device).repeat(num_tokens - len(choices), 1)
                replay.target_topk_idx = torch.cat([choices, padding])
            replay.router_replay_action = action
