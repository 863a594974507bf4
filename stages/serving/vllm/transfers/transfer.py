"""Ways of a training's new weights into a vLLM that it has started, without a folder: their protocol, vLLM's routes.

They use vLLM's weight transfer: an engine in the server's workers, which routes of the server introduce, start, feed
and finish. A new way is a module beside this one and a line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stages.core.errors import ServerError
from stages.models.weight_files import read_tensors
from stages.serving.engine import LaunchSpec, WeightConnection

if TYPE_CHECKING:  # their HTTP and tensors would slow every plan
    from stages.serving.backend import EngineAddress
    from stages.serving.held_weights import HeldWeight, HeldWeights

IN_WORKER = Path(__file__).parents[1] / "in_worker"
"""Folder of modules that vLLM's workers import, which is all that they see of ours."""
NUM_NAMED = 3


class WeightTransfer(Protocol):
    """Way of new weights into a running vLLM (protocol).

    made_for: pairs of the server's kind of device and the placement. arguments, environment: of the server's command.
    """

    made_for: frozenset[tuple[str, str]]

    @property
    def arguments(self) -> Sequence[str]: ...

    @property
    def environment(self) -> Mapping[str, str]: ...

    def connected(self, server: WeightRoutes, spec: LaunchSpec) -> AbstractContextManager[WeightConnection]:
        """Connect this process with a server that was started with `spec`, until the context ends.

        Raises as `WeightRoutes.post` does.
        """


@dataclass(frozen=True)
class WeightRoutes:
    """Routes of a running vLLM by which its workers take new weights. sees: whether it keeps what its tower sees."""

    address: EngineAddress
    api_key: str
    timeout_s: float
    sees: bool = False

    def post(self, route: str, body: dict[str, Any], what: str = "") -> None:
        """Post to a route. Raises ServerError for a refusal, TransientError for no answer."""
        from stages.serving.vllm.swap import post

        post(self.address, self.api_key, route, body, what, self.timeout_s)

    def begin(self, init_info: dict[str, Any]) -> None:
        """Introduce this process to the server's workers, once."""
        self.post("init_weight_transfer_engine", {"init_info": init_info})

    def start(self) -> None:
        self.post("start_weight_update", {})

    def update(self, update_info: dict[str, Any]) -> None:
        self.post("update_weights", {"update_info": update_info})

    def finish(self) -> None:
        """Let the workers take the weights into use, and forget what they computed with the former ones."""
        self.post("finish_weight_update", {})
        # A prompt that was seen before would be answered from the keys and values of the former weights.
        self.post("reset_prefix_cache", {})
        if self.sees:  # and a picture, with what the former tower made of it
            self.post("reset_encoder_cache", {})


def described(weights: Sequence[HeldWeight]) -> dict[str, Any]:
    """Return the fields of an update that every engine of vLLM has."""
    return {
        "names": [one.name for one in weights],
        "dtype_names": [one.dtype_name for one in weights],
        "shapes": [list(one.shape) for one in weights],
    }


def served_shapes(spec: LaunchSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights from which a server was started, by their names in its folder's files."""
    files = sorted(spec.model.glob("*.safetensors"))
    return {tensor.name: tensor.shape for path in files for tensor in read_tensors(path)}


def check_same(weights: HeldWeights, served: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ServerError unless these are the weights that the server has, by name and shape."""
    found = weights.shapes
    lacking = sorted(served.keys() - found.keys())
    unknown = sorted(name for name, shape in found.items() if served.get(name) != shape)
    if lacking or unknown:
        raise ServerError(
            f"giving new weights to the server that samples: it has {len(lacking)} that the training does not "
            f"({', '.join(lacking[:NUM_NAMED])}), and {len(unknown)} of the training's are not its own, or have "
            f"another shape ({', '.join(unknown[:NUM_NAMED])}); report this with the model's name"
        )
