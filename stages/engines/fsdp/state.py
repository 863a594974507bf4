"""Checkpoints of weights and optimizer state with torch.distributed.checkpoint: asynchronous, resharded on load."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from stages.adapters.effect import split_experts
from stages.engines.fsdp.rectangles import RectanglesReader, RectanglesWriter
from stages.models.stored_tensors import CheckpointReader, check_stored


class TrainingState:
    """Weights and optimizer state in a checkpoint, by the parameter names of the Hugging Face model.

    An adapter's B of experts [out, rank × experts] is kept as [experts, out, rank], in which each expert is a
    rectangle, so that the other engine, which spreads experts over processes, can read and write its own.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._num_experts: dict[str, int] = {}
        if any(".lora_B." in name for name, _ in model.named_parameters()):
            from stages.adapters.lora import num_experts_of_factors  # and PEFT

            of_factors = num_experts_of_factors(model).items()
            self._num_experts = {name: number for name, number in of_factors if ".lora_B." in name}
        # The writing thread has collectives of its own, which must not meet those of training in one group.
        self._group = dist.new_group(backend="gloo")

    def save(self, folder: Path) -> Future[None]:
        """Copy the state to host memory and write it in a thread; the future is done when all processes are."""
        state = self._state()
        state["model"] = self._untied(state["model"])  # a tied head would be there though embedding and head are frozen
        state["model"] = self._by_expert(state["model"])
        state["optimizer"]["state"] = self._moments_by_expert(state["optimizer"]["state"])
        return dcp.async_save(state, checkpoint_id=folder, process_group=self._group, planner=RectanglesWriter())

    def load(self, folder: Path) -> None:
        """Restore a checkpoint of either engine, reading own shards only; ModelError when it is another model's."""
        state = self._state()
        wanted = {
            "model": self._by_expert(self._untied(state["model"])),
            "optimizer": {"state": self._moments_by_expert(state["optimizer"]["state"])},
        }
        # Before reading, so that all processes raise one error, which names what differs.
        check_stored(folder, {key: tuple(tensor.shape) for key, tensor in flatten_state_dict(wanted)[0].items()})
        reader, planner = CheckpointReader(folder), RectanglesReader()
        dcp.load(wanted, storage_reader=reader, planner=planner, process_group=self._group)
        # `wanted` holds the tensors of `state`, or views of them: loading has filled both.
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),  # a base that is frozen is in no checkpoint
        )

    def _untied(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights to save in a checkpoint: of weights tied to each other, only one."""
        tied = getattr(self._model, "all_tied_weights_keys", None) or {}
        return {name: weight for name, weight in weights.items() if name not in tied}

    def _by_expert(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return weights with LoRA's B of experts viewed as [experts, out, rank], as checkpoints hold it."""
        return {
            name: split_experts(one.detach(), self._num_experts[name], "B") if name in self._num_experts else one
            for name, one in weights.items()
        }

    def _moments_by_expert(self, state: dict[str, Any]) -> dict[str, Any]:
        def seen(name: str, kept: dict[str, Any]) -> dict[str, Any]:
            # All but `step`, which is a scalar.
            moments = {key: self._by_expert({name: one})[name] for key, one in kept.items() if one.ndim}
            return {**kept, **moments}

        return {name: seen(name, kept) if name in self._num_experts else kept for name, kept in state.items()}

    def _state(self) -> dict[str, Any]:
        options = StateDictOptions(ignore_frozen_params=True)
        model, optimizer = get_state_dict(self._model, self._optimizer, options=options)
        return {"model": model, "optimizer": optimizer}
