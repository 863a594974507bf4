"""Buffers on a GPU that another process has exported, as the arguments by which torch maps them. Needs torch alone."""

import base64
from typing import Any

import torch


def arguments_of(handle: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of torch's `rebuild_cuda_tensor` for a flat buffer of bytes, from a handle in JSON.

    vLLM puts its own device's index where they have one. Raises KeyError, ValueError or TypeError for another object.
    """
    num_bytes = int(handle["num_bytes"])
    return (
        torch.Tensor,
        torch.Size([num_bytes]),
        (1,),
        0,  # offset in the storage
        torch.UntypedStorage,
        torch.uint8,
        0,  # the device's index
        base64.b64decode(handle["handle"], validate=True),
        int(handle["storage_bytes"]),
        int(handle["storage_offset"]),
        False,  # requires_grad
        base64.b64decode(handle["counter"], validate=True),
        int(handle["counter_offset"]),
        base64.b64decode(handle["event"], validate=True),
        bool(handle["event_sync"]),
    )
