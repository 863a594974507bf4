"""Registry of the ways in which new weights reach a vLLM without a folder, by name."""

from collections.abc import Sequence

from stages.serving.engine import LaunchSpec
from stages.serving.vllm.transfers.ipc import ByIpc
from stages.serving.vllm.transfers.memory import ByMemory
from stages.serving.vllm.transfers.nccl import ByNccl
from stages.serving.vllm.transfers.transfer import WeightTransfer

TRANSFERS: dict[str, WeightTransfer] = {"memory": ByMemory(), "nccl": ByNccl(), "ipc": ByIpc()}


def chosen(device: str, placement: str) -> str | None:
    """Return the way for a kind of device of the server, such as `cuda`, and a placement; None: by a folder."""
    return next((name for name, one in TRANSFERS.items() if (device, placement) in one.made_for), None)


def transfer_arguments(spec: LaunchSpec) -> Sequence[str]:
    """Return the command-line arguments of a server that takes weights in the way that `spec` names."""
    return TRANSFERS[spec.weight_transfer].arguments if spec.weight_transfer else ()
