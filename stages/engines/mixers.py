"""Modules that carry something along the sequence (recurrent states, short convolutions), in rows of packed documents.

Such a module, a mixer, would carry it from one document into the next. Alone of its model it is run on documents laid
out by themselves, in buckets of similar length; all else sees packed rows. Padding comes last, where nothing that is
causal looks. On a GPU `state_kernels.py` may do it in one pass. `fsdp/probe.py` finds the mixers, and proves the model
with them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import noop_context_fn

from stages.core.errors import ModelError
from stages.engines.documents import Bucket, PackedDocuments, pad_documents, unpad_documents
from stages.engines.state_kernels import by_boundaries

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of a checkpoint's forward pass and of its recomputation, as `torch.utils.checkpoint` takes them."""

_in_the_rows: ContextVar[PackedDocuments | None] = ContextVar("documents", default=None)


@contextmanager
def mixing(documents: PackedDocuments | None) -> Iterator[None]:
    """Let mixers that run in this context know the documents of the rows that they are given."""
    token = _in_the_rows.set(documents)
    try:
        yield
    finally:
        _in_the_rows.reset(token)


def mixing_again(contexts: Callable[[], Contexts] = noop_context_fn) -> Contexts:
    """Return a checkpoint's contexts by which a layer that is recomputed finds the documents of its forward pass.

    contexts: function of further ones.
    """
    forward, again = contexts()
    return forward, _within(mixing(_in_the_rows.get()), again)


def mix_by_document(layers: Iterable[nn.Module], classes: Collection[type[nn.Module]]) -> None:
    """Make the layers' children of these classes run on each document by itself; those that do already stay so."""
    for child in _children(layers):
        if type(child) in classes and not _is_mixer(child):
            # An attribute of the instance: hooks, names and parameters stay those of Transformers' module.
            child.forward = partial(_by_document, child.forward)


def has_mixers(layers: Iterable[nn.Module]) -> bool:
    """Return whether some of the layers' children run on each document by itself."""
    return any(map(_is_mixer, _children(layers)))


def _children(layers: Iterable[nn.Module]) -> Iterator[Any]:
    return (child for layer in layers for child in layer.children())


def _is_mixer(module: Any) -> bool:
    return getattr(module.forward, "func", None) is _by_document


@contextmanager
def _within(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    outer, inner = contexts
    with outer, inner:
        yield


@torch.compiler.disable  # the buckets' shapes change with each batch
def _by_document(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Run a mixer on each bucket of the rows' documents; tensors that it takes and gives are [rows, sequence, …]."""
    documents = _in_the_rows.get()
    if documents is None:
        raise ModelError("a module that carries a state along the sequence was run without the boundaries of documents")
    if len(documents.lengths) == 1:
        return forward(*given, **named)
    arguments, structure = tree_flatten((given, named))
    rows = next(one.shape[:2] for one in arguments if isinstance(one, Tensor))
    in_one_pass = by_boundaries(forward, documents)
    pads, run = in_one_pass is None, in_one_pass or forward
    buckets = documents.buckets if pads else [Bucket(0, 1, documents.num_tokens)]
    laid_out = [_laid_out(one, documents, pads) if isinstance(one, Tensor) else one for one in arguments]
    outputs: list[Tensor] = []
    for bucket in buckets:
        shape = bucket.num_documents, bucket.length
        of_bucket = [
            one[bucket.start : bucket.end].view(*shape, *one.shape[1:]) if isinstance(one, Tensor) else one
            for one in laid_out
        ]
        positional, by_name = tree_unflatten(of_bucket, structure)
        output = run(*positional, **by_name)
        states, *others = output if isinstance(output, tuple) else (output,)
        outputs.append(states.flatten(0, 1))
    tokens = unpad_documents(torch.cat(outputs), documents) if pads else outputs[0]
    mixed = tokens.unflatten(0, rows)
    # A last state is not passed on: the next document starts from none.
    return (mixed, *[None] * len(others)) if isinstance(output, tuple) else mixed


def _laid_out(states: Tensor, documents: PackedDocuments, pads: bool) -> Tensor:
    """Return states of packed rows, [rows, sequence, …], as [tokens, …], or those of padded documents."""
    if states.shape[:2].numel() != documents.num_tokens:
        raise ModelError(
            f"a module that carries a state along the sequence takes a tensor of shape {list(states.shape)}, which "
            f"cannot be laid out as the documents of {documents.num_tokens} tokens"
        )
    return pad_documents(states.flatten(0, 1), documents) if pads else states.flatten(0, 1)
