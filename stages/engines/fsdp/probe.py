"""Probe of an architecture: its documents train packed in one row, as rows of their own, or not at all.

The answer is measured, for any model that Transformers can build, on a slice of it: random weights in fp64 on the CPU,
the first layers, enough to show every kind, and narrow where the model is large, with windows and chunks shorter than
the documents. A way to train is right if other tokens in one document change nothing in the next, and if each document
gets the log-probabilities that Transformers gives it alone. Where packed documents change each other, the children of
layers that do it are found, and the model is tried again with these run on each document by itself. Real weights are
compared too, once they are read (`check_log_probabilities`), but too late for a choice, in fp32, and on documents
shorter than any window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.initialization import no_init_weights

from stages.core.errors import ModelError
from stages.data.batch import Batch
from stages.engines.attention import PACKED_DOCUMENTS, hidden_states, register_packed_attention
from stages.engines.fsdp.drawn import DrawnDocuments, cut_tower, follow_width, with_small_ids
from stages.engines.fsdp.packed import packed
from stages.engines.media import Blocks
from stages.engines.mixers import mix_by_document
from stages.engines.rotary import long_from, rotate_by_document
from stages.models import loading
from stages.models.layers import decoder_of, keep_kinds_of_layers, parts_for_text, text_layers
from stages.models.media import NOUNS, in_words

LENGTHS = (12, 10)
"""Lengths in tokens of the two documents of a probe: of one bucket, so that the shorter is padded."""
LONG_FROM = 11
"""Number of tokens beyond which a document counts as long in the check of rotary angles that depend on length."""
LARGEST_LEAK = 1e-6
"""Largest change of a document's log-probabilities, in nats, by other tokens in the document before it."""
LARGEST_DIFFERENCE = 1e-5
"""Largest difference from Transformers' log-probabilities in nats."""
ROWS = ("sdpa", "eager")
"""Transformers' own attention for documents as rows of their own, the fastest first."""

SHORT = 4
"""Length in tokens of a slice's windows and chunks, so that the documents of a probe reach beyond."""
NARROW = 512
"""Hidden size above which a slice is narrower than its model, with fewer heads of the same width."""
MOST_EXPERTS = 32
LARGEST_SLICE = 2**27
"""Largest number of a slice's parameters that text passes through: 1 GiB in fp64."""

Mixers = frozenset[type[nn.Module]]
"""Classes of modules that carry something along the sequence."""
Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a call."""


@dataclass(frozen=True)
class Verdict:
    """Answer of a probe: the way to train an architecture's documents that is fastest among those that are right."""

    attention: str | None
    """Transformers' `attn_implementation` to build the model with; None for its default."""
    sentence: str
    """Sentence for people: the way that was chosen with what was measured, and why faster ones are wrong."""
    mixers: Mixers = frozenset()
    """Classes of the layers' children that would carry something from one packed document into the next."""
    blocks: Blocks = None
    """Layers in which the tokens of a picture see each other both ways."""

    @property
    def packs(self) -> bool:
        """Return whether documents are packed in rows, instead of each a row of its own."""
        return self.attention == PACKED_DOCUMENTS

    @property
    def tags(self) -> dict[str, str]:
        """Tags of a training of the probed architecture."""
        return {"documents": "packed" if self.packs else "rows", "probe": self.sentence}


def probe(config: Any, *, trust_remote_code: bool, drawn: DrawnDocuments | None = None) -> Verdict:
    """Find out how documents of a model with this config can be trained; raise ModelError if in no way.

    drawn: documents with pictures, of a model that sees.
    """
    register_packed_attention()
    reason: Exception | None = None
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # a training's own random numbers stay as they are
        for small, cuts_layers in product(_narrowed(config), (True, False)):
            slices = _Slices(small, cuts_layers, trust_remote_code, drawn)
            try:
                expected = slices.alone()
            except Exception as error:  # whatever an architecture makes of sizes that it was never built with
                reason = error
            else:
                return _choose(slices, expected)
    if drawn:
        media = in_words(drawn.kinds)
        raise ModelError(f"this architecture cannot be trained on rows with {media}: no slice of it runs ({reason})")
    return Verdict(None, f"documents train as rows of their own: no slice of this architecture runs ({reason})")


def _choose(slices: _Slices, expected: Tensor) -> Verdict:
    """Try the ways to train in order; return the first that is right. expected: log-probabilities of each alone."""
    wrong: list[str] = []
    for attention, mixers, blocks in _ways(slices):
        way = "packed" if attention == PACKED_DOCUMENTS else f"as rows of their own, with {attention}"
        if mixers:
            way += f", {' and '.join(sorted(one.__name__ for one in mixers))} on each by itself"
        way += f", tokens of a picture seeing each other {blocks}" if blocks else ""
        try:
            usual, changed, seen = slices.together(attention, mixers, blocks)
        except Exception as error:  # of an architecture that cannot be run so
            wrong.append(f"{way}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        own, leak = (part.abs().max().item() for part in (usual - changed).tensor_split([slices.begins_second]))
        difference = (usual - expected).abs().max().item()
        other = f"another {NOUNS[slices.drawn.kinds[0]]}" if slices.drawn else "other tokens"
        measured = (
            f"{way}: {other} in one document change{'s' if slices.drawn else ''} the next by {leak:.1g} nats, and "
            f"Transformers' own log-probabilities differ by {difference:.1g}"
        )
        if unseen := slices.layer_types - seen:
            wrong.append(f"{way}: no layer of type {', '.join(sorted(unseen))} was run")
        elif not own > LARGEST_LEAK:
            wrong.append(f"{way}: {other} in a document change{'s' if slices.drawn else ''} nothing in it")
        elif leak <= LARGEST_LEAK and difference <= LARGEST_DIFFERENCE:  # not where one is NaN
            kinds = f" (layers: {', '.join(sorted(seen))})" if seen else ""
            return Verdict(attention, "; ".join([f"documents train {measured}{kinds}", *wrong]), mixers, blocks)
        else:
            wrong.append(measured)
    media = in_words(slices.drawn.kinds) if slices.drawn else ""
    raise ModelError(
        f"this architecture cannot be trained{f' on rows with {media}' if media else ''}: tried on a slice of "
        f"it with random weights, {'; '.join(wrong)}; take another model"
    )


def _ways(slices: _Slices) -> Iterator[tuple[str, Mixers, Blocks]]:
    """Yield the ways to train, the fastest first.

    Each is an implementation of attention, the mixers to run apart, and where the tokens of a picture see each other.
    """
    mixers: Mixers = frozenset()
    yield PACKED_DOCUMENTS, mixers, None
    with suppress(Exception):  # of an architecture that cannot be run so, as the way before has found
        mixers = slices.mixers()
    if mixers:
        yield PACKED_DOCUMENTS, mixers, None
    if slices.drawn:
        yield PACKED_DOCUMENTS, mixers, "in all layers"
        yield PACKED_DOCUMENTS, mixers, "in windows"
    for attention in ROWS:
        yield attention, frozenset(), None


@dataclass(frozen=True)
class _Slices:
    """Small models of one architecture with the same random weights, each with another implementation of attention."""

    config: Any
    cuts_layers: bool
    trust_remote_code: bool
    drawn: DrawnDocuments | None = None

    @property
    def layer_types(self) -> set[str]:
        return set(getattr(self.config.get_text_config(), "layer_types", None) or ())

    @property
    def begins_second(self) -> int:
        """Index of the second document's first token in the packed row."""
        return self.drawn.lengths[0] if self.drawn else LENGTHS[0]

    def alone(self) -> Tensor:
        """Return the documents' log-probabilities [tokens, vocabulary], each alone, by Transformers' plain products."""
        causal_lm = self._build("eager")
        decoder = decoder_of(causal_lm, sees=self.drawn is not None)
        with long_from(decoder, LONG_FROM), _InDoublePrecision():
            states = [decoder(**arguments, use_cache=False)[0] for arguments in self._arguments(decoder)]
        return _log_probabilities(causal_lm, torch.cat(states, dim=1))

    def mixers(self) -> Mixers:
        """Return the classes of the packed layers' children by which a document's states change those of the next."""
        causal_lm = self._build(PACKED_DOCUMENTS)
        decoder = decoder_of(causal_lm, sees=self.drawn is not None)
        children = [child for layer in text_layers(causal_lm) for child in layer.children()]
        with _InDoublePrecision():
            with _calls(children) as calls:
                hidden_states(decoder, self._batches[0].inputs)
            lengths = self.drawn.lengths if self.drawn else LENGTHS
            return frozenset(
                type(child) for child, given in calls.items() if _leak_of(child, given, lengths) > LARGEST_LEAK
            )

    def together(self, attention: str, mixers: Mixers, blocks: Blocks = None) -> tuple[Tensor, Tensor, set[str]]:
        """Return two documents' log-probabilities as training runs them: as they are, and with another first one.

        Also returns the types of the layers that ran.
        """
        causal_lm = self._build(attention)
        decoder = decoder_of(causal_lm, sees=self.drawn is not None)
        rotate_by_document(decoder)
        mix_by_document(text_layers(causal_lm), mixers)
        with long_from(decoder, LONG_FROM), _layers_that_run(causal_lm) as seen, _InDoublePrecision():
            found, changed = (
                _log_probabilities(causal_lm, hidden_states(decoder, batch.inputs, blocks=blocks))
                for batch in self._batches
            )
        return found, changed, seen

    @property
    def _batches(self) -> list[Batch]:
        """Two documents packed in a row: as they are, and with another first one."""
        if self.drawn:
            return [with_small_ids(one, self.drawn, self.config) for one in self.drawn.batches(torch.float64)]
        first, second, other = self._documents
        return [packed([begin, second]) for begin in (first, other)]

    def _arguments(self, decoder: Any) -> list[dict[str, Tensor]]:
        """Return the decoder's arguments of each document alone, as Transformers' user gives them."""
        if self.drawn:
            alone = [with_small_ids(one, self.drawn, self.config) for one in self.drawn.alone(torch.float64)]
            return [self.drawn.arguments(decoder, batch) for batch in alone]
        return [{"input_ids": one[None]} for one in self._documents[:2]]

    @property
    def _documents(self) -> Sequence[Tensor]:
        """Token ids of the first and the second document, and of another first one; 0 may be padding."""
        lengths = (*LENGTHS, LENGTHS[0])
        return torch.arange(1, 1 + sum(lengths)).remainder(self.config.get_text_config().vocab_size).split(lengths)

    def _build(self, attention: str) -> Any:
        torch.manual_seed(0)
        # Plain products for experts too: kernels for all at once have no fp64, and add up by the experts' shares.
        build = {"attn_implementation": attention, "experts_implementation": "eager"}
        options: dict[str, Any] = {**build, "trust_remote_code": self.trust_remote_code}
        if self.drawn:
            options |= {"head": "pictures", "attn_implementation": {"text_config": attention}}
        with no_init_weights():  # memory that is never written, of towers of images and of later layers, takes none
            causal_lm = loading.build_model(deepcopy(self.config), device="cpu", **options)
        causal_lm.tie_weights()
        if self.cuts_layers:
            keep_kinds_of_layers(causal_lm)
        of_text = [one for part in parts_for_text(causal_lm) for one in part.parameters()]
        if (num_parameters := sum(map(Tensor.numel, of_text))) > LARGEST_SLICE:
            raise MemoryError(f"a slice of {num_parameters} parameters is too large for a probe")
        if self.drawn:
            cut_tower(causal_lm)
        written = [*causal_lm.parameters()] if self.drawn else of_text
        for weight in {*causal_lm.parameters()} - {*written}:
            weight._is_hf_initialized = True  # the mark that Transformers puts on weights that it has read
        causal_lm.initialize_weights()
        for weight in written:
            if weight.ndim > 1:  # larger than a new model's, so that a token that sees too much makes a difference
                weight.normal_(std=1.5 * _fan_in(weight) ** -0.5)
            else:  # a gate that begins at 0 would hide what passes through it once it is trained
                weight.add_(torch.randn_like(weight), alpha=0.1)
        return causal_lm.double().eval()


def _fan_in(weight: Tensor) -> int:
    return weight.shape[-1] if weight.ndim < 4 else weight[0].numel()  # a kernel of patches; experts are stacked


class _InDoublePrecision(TorchFunctionMode):
    """Context in which code that asks for fp32 (softmax, norms) gets fp64, so that only real differences are seen.

    Where scores are large, as Gemma 4's, rounding in fp32 alone would change log-probabilities by 5e-5.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = Tensor.double if func is Tensor.float else func
        named = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        return function(*map(_doubled, args), **named)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def _calls(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Given]]:
    """Collect the positional and named arguments with which modules are called in this context."""
    calls: dict[nn.Module, Given] = {}

    def note(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls[module] = positional, named

    handles = [one.register_forward_pre_hook(note, with_kwargs=True) for one in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _leak_of(module: nn.Module, given: Given, lengths: Sequence[int]) -> float:
    """Return the largest change of what a module gives for the second document by other states in the first."""
    first, total = lengths[0], sum(lengths)

    def others(states: Tensor) -> Tensor:
        if not states.is_floating_point() or states.shape[:2] != (1, total):
            return states
        return torch.cat([states[:, :first].flip(1), states[:, first:]], dim=1)

    usual, changed = (
        next(one for one in tree_leaves(module(*positional, **named)) if isinstance(one, Tensor))
        for positional, named in (given, tree_map_only(Tensor, others, given))
    )
    if usual.shape[:2] != (1, total):
        return 0.0
    return (usual - changed)[:, first:].abs().max().item()


@contextmanager
def _layers_that_run(causal_lm: Any) -> Iterator[set[str]]:
    """Collect the types, as in the config's `layer_types`, of text layers that run in this context."""
    seen: set[str] = set()
    types = getattr(causal_lm.config.get_text_config(), "layer_types", None) or ()

    def note(kind: str) -> Callable[..., None]:
        return lambda *_: seen.add(kind)

    layers = zip(text_layers(causal_lm), types, strict=False)  # the slice has the first layers only
    handles = [layer.register_forward_hook(note(kind)) for layer, kind in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _log_probabilities(causal_lm: Any, hidden: Tensor) -> Tensor:
    """Return log-probabilities [tokens, vocabulary] from last hidden states [1, tokens, width].

    What an architecture does to its logits is left out: it is the same for every token.
    """
    logits: Tensor = causal_lm.get_output_embeddings()(hidden)[0]
    return logits.double().log_softmax(-1)


def _narrowed(config: Any) -> Iterator[Any]:
    """Yield configs of slices: the narrowest first, for which an architecture may have no layers, the whole last."""
    width = getattr(config.get_text_config(), "hidden_size", 0)  # one that has none is not narrowed
    divisors = [divisor for divisor in (16, 8, 4, 2) if width / divisor >= NARROW / 2]
    for divisor in (*divisors, 1):
        small = deepcopy(config)
        if _narrow(small.get_text_config(), divisor):
            follow_width(small, width)
            yield small
    short = deepcopy(config)
    _shorten(short.get_text_config())
    yield short


def _narrow(text: Any, divisor: int) -> bool:
    """Divide hidden size and heads, whose width stays, and bound other sizes; return whether all can be divided."""
    _shorten(text)
    by_layer = text.to_dict().get("per_layer_config", {})  # Gemma 4's layers differ in heads
    for sizes in (vars(text), *by_layer.values()):
        for name, value in _numbers(sizes):
            if name.endswith(("hidden_size", "heads", "n_head", "n_embd", "d_model", "d_ssm", "lru_width", "proj_dim")):
                if value % divisor and "kv" not in name and "key_value" not in name:
                    return False
                sizes[name] = value // divisor or 1  # a head of keys and values is shared by any number
            elif name.endswith(("intermediate_size", "ffn_dim", "n_inner")):
                sizes[name] = min(value, NARROW // 4)
            elif name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
                sizes[name] = min(value, MOST_EXPERTS)
    if by_layer:
        text.per_layer_config = by_layer
    ffn_sizes = getattr(text, "intermediate_size", None)
    if isinstance(ffn_sizes, list):  # one for each layer (Gemma 3n)
        text.intermediate_size = [min(size, NARROW // 4) for size in ffn_sizes]
    return True


def _shorten(text: Any) -> None:
    """Bound vocabulary, windows and chunks of attention."""
    for name, value in _numbers(vars(text)):
        if "vocab_size" in name:
            setattr(text, name, min(value, 64))
        elif name.endswith(("window", "window_size", "chunk_size")):
            setattr(text, name, min(value, SHORT))
    if getattr(text, "pad_token_id", None) is not None:  # CodeGen's config has no such field
        text.pad_token_id = 0  # within the small vocabulary


def _numbers(fields: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the fields of a config that are whole numbers above 0."""
    return [(name, value) for name, value in fields.items() if type(value) is int and value > 0]
