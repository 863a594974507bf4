"""Layers' tensors for the backward pass leave the device and come back a layer ahead, and no bit of them changes."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.core.errors import ModelError
from stages.engines.fsdp import offload, token_parallel
from stages.engines.fsdp.offload import offload_activations
from stages.parallel.processes import joined_processes

WIDTH, ROWS, NUM_LAYERS = 64, 32, 5
NUM_BLOCKS = 3
"""Number of tensors that a layer saves: its input, the input's product with the angles, and the wide tensor."""


class Layer(GradientCheckpointingLayer):
    """Layer that saves one tensor with two strides, and one that all layers are given."""

    def __init__(self, overwrites: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.overwrites = overwrites

    def forward(self, hidden: Tensor, angles: Tensor) -> Tensor:
        wide = self.up(hidden * angles).sigmoid()
        result = hidden + self.down(wide) + (wide.T * wide.T).mean()
        if self.overwrites:
            wide.detach().zero_()
        return result


def made(*, overwrites: bool = False) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer(overwrites) for _ in range(NUM_LAYERS)).train()


def offloaded(*, overwrites: bool = False) -> nn.ModuleList:
    layers = made(overwrites=overwrites)
    offload_activations(list(layers), torch.device("cpu"))
    return layers


def through(layers: nn.ModuleList, hidden: Tensor, angles: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, angles)
    return hidden.square().mean()


def gradients(layers: nn.ModuleList) -> list[Tensor]:
    """Return the gradients of two backward passes, the second one of two forward passes that were made before it."""
    torch.manual_seed(1)
    hidden, angles = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
    through(layers, hidden, angles).backward()
    with torch.no_grad():
        through(layers, hidden, angles)
    (through(layers, hidden, angles) * through(layers, hidden / 2, angles)).backward()
    return [one.grad for one in (*layers.parameters(), angles) if one.grad is not None]


def test_the_last_layers_tensors_are_read_without_waiting_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    # Of a CPU, whose streams have no events, and wait for None as well.
    monkeypatch.setattr(torch.cpu.Stream, "record_event", lambda _: object())
    monkeypatch.setattr(torch.cpu.Stream, "wait_event", lambda _, event: waited.append(event))
    gradients(offloaded())
    assert waited
    assert None not in waited


def test_gradients_are_those_of_layers_that_keep_their_tensors() -> None:
    expected, found = gradients(made()), gradients(offloaded())
    assert len(found) == len(expected) == 4 * NUM_LAYERS + 1
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_the_device_holds_tensors_of_two_layers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and the angles of all layers stay; so do the last layer's tensors, whose backward pass comes next."""
    copy, sizes, on_device, away = offload._Offloading.copy, [], [], False

    def recording(self: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        # Those of one layer are still there: of the layer before, whose copies run, or of the one that runs backward.
        assert sum(one() is not None for one in on_device) <= NUM_BLOCKS
        sizes.append(sorted(len(source) for _, source in pairs))
        on_device.extend(weakref.ref(pair[0 if away else 1]) for pair in pairs)
        return copy(self, pairs)

    monkeypatch.setattr(offload._Offloading, "copy", recording)
    hidden, angles = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = through(offloaded(), hidden, angles)
    assert sizes == [[4 * ROWS * WIDTH, 4 * ROWS * WIDTH, 16 * ROWS * WIDTH]] * (NUM_LAYERS - 1)
    assert not any(one() is not None for one in on_device)
    away = True
    loss.backward()
    assert len(sizes) == 2 * (NUM_LAYERS - 1)
    assert not any(one() is not None for one in on_device)


def test_a_layer_that_overwrites_what_it_saved_is_refused() -> None:
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    with pytest.raises(ModelError, match=r"overwrites a tensor.*layout\.recompute"):
        through(offloaded(overwrites=True), hidden, hidden)


def test_gathered_weights_of_split_tokens_do_not_leave_the_device() -> None:
    """FSDP2 frees them behind the layer, and gathers them again."""
    with joined_processes():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        down = nn.Linear(4 * WIDTH, WIDTH)
        down.weight = nn.Parameter(distribute_tensor(down.weight.data, mesh, [Shard(1)]))
        down.bias = nn.Parameter(distribute_tensor(down.bias.data, mesh, [Replicate()]))
        split = ALL_PARALLEL_STYLES[token_parallel.FORM["rowwise"]].install_forward(down, mesh)
        token_parallel._now.tokens = token_parallel._Tokens(mesh.get_group(), torch.Size((1, ROWS)))
        saved = offload._SavedTensors(offload._Offloading(torch.device("cpu")), offload._tensors_of(down), set())
        states = torch.randn(1, ROWS, 4 * WIDTH, requires_grad=True)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            split(states)
        assert [*saved.blocks] == [offload._memory(states)]


def test_layers_that_transformers_cannot_recompute_are_refused() -> None:
    with pytest.raises(ModelError, match=r"activations of Linear: .*`layout\.recompute: none`"):
        offload_activations([nn.Linear(1, 1)], torch.device("cpu"))
