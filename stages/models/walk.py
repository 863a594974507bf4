"""Walk through a model without weights, which Transformers builds from its config, to measure its kinds of layers.

The forward pass runs on the meta device, where tensors have shapes but no data: autograd says what it keeps for the
backward pass, torch's formulas what each operation costs, and attention, which is replaced, how wide it is. Only
Transformers' own classes are built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from stages.core.errors import ModelError
from stages.core.redaction import shortened
from stages.models.adapter_targets import FORMER_NAMES, is_named
from stages.models.facts import CONFIG_FILE, ModelFacts
from stages.models.layer_kinds import (
    Attention,
    KeptBytes,
    LayerKind,
    LayerRole,
    Linear,
    StackedParameter,
    is_expert,
    splits_heads,
)
from stages.models.layers import decoder_of, parts_for_text, signature, text_layers
from stages.models.loading import Head, build_model, class_with_head
from stages.models.shape import ModelShape
from stages.models.split_states import PlannedWeight, SplitStates, planned_weights

LONGEST_REASON = 500
HEADS: tuple[Head, ...] = ("tokens", "pictures")
MOST_KINDS = 64
LEAST_TOKENS, MOST_TOKENS = 64, 256
"""Bounds of the number of tokens of a short walk."""
WALKED = "walked"
"""Name of the attention by which a walk replaces a model's own."""
CHUNKED = "chunked_attention"
"""Type of layers whose tokens attend within chunks, by a mask that attention which is replaced does not see."""
_NAMED_AS = {"mixtral": FORMER_NAMES["mixtral"], "qwen2_moe": FORMER_NAMES["qwen3_moe"]}
"""Former names of experts' linear layers, by the family whose ones PEFT accepts."""
LEAST_BY_PAIR = 1.0
"""Products, or bytes, for each pair of tokens from which a layer has attention that could not be replaced."""


class _Attention(torch.autograd.Function):
    """Attention that keeps for its backward pass what fused kernels keep: inputs, output, and a number a query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, tokens, _ = query.shape
        output = query.new_empty(rows, tokens, heads, value.shape[3])
        ctx.save_for_backward(query, key, value, output, query.new_empty(rows, heads, tokens, dtype=torch.float32))
        return output


@dataclass
class Seen:
    """Record of a walk for one layer: operations of its products, attention, bytes kept, inputs of linear layers."""

    weight_flops: float = 0.0
    expert_flops: float = 0.0
    state_flops: float = 0.0
    kept_bytes: float = 0.0
    split_bytes: float = 0.0
    """Bytes kept between split matrices, of which each process of `tp` would keep its part."""
    largest_bytes: list[float] = field(default_factory=lambda: [0.0, 0.0])  # outside split matrices, and between them
    attention: list[Attention] = field(default_factory=list)
    attention_products: float = 0.0
    """Number of multiplications in attention that was replaced, those of masked pairs included."""
    input_bytes: int = 0
    inputs: dict[str, int] = field(default_factory=dict)
    """Storage of the input of each linear layer that ran, by the layer's name."""
    kept_inputs: set[str] = field(default_factory=set)
    """Names of the linear layers whose input the backward pass needs."""
    ends_in_sum: bool = False  # as in `LayerKind`


@dataclass(frozen=True)
class _Ran:
    """Record of a layer that has run: what it did, its output, and which of its arguments and output autograd keeps."""

    seen: Seen
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    kept: list[bool]


class Walk(TorchDispatchMode):
    """Records by layer what a forward pass on the meta device does. Questions about values, which are none, get any."""

    current: Walk

    def __init__(
        self, num_layers: int, weights: dict[int, PlannedWeight], constants: set[int], num_experts: int
    ) -> None:
        """Create a walk. weights: a model's, by their storages; constants: storages of buffers."""
        super().__init__()
        self.seen = [Seen() for _ in range(num_layers)]
        self.outside = Seen()
        """Work before, between and after layers."""
        self._now = self.outside
        self._in_experts = False
        self._weights, self._num_experts = weights, num_experts
        self._kept: set[int] = set()
        self._ran: dict[Any, _Ran] = {}
        self.split = SplitStates(weights, constants)
        self.packs = True
        """True if all attention knows where documents end, and needs to know no more of pairs of tokens."""
        self._not_counted = weights.keys() | constants
        self._alive: list[Any] = []
        """Storages that were met: a new one would get the number of one that is gone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and func is torch.ops.aten._local_scalar_dense.default:
            return False if first.dtype == torch.bool else 1.0 if first.dtype.is_floating_point else 1
        if first is not None and func is torch.ops.aten.nonzero.default:
            # All experts have tokens, and each of them its share.
            share = 1 if first.ndim == 1 or not self._num_experts else self._num_experts
            return first.new_empty((max(1, first.numel() // share), first.ndim), dtype=torch.int64)
        output = self._called(func, args, kwargs or {})
        if (ends_in_sum := self.split.follow(func, tree_leaves((args, kwargs)), tree_leaves(output))) is not None:
            self._now.ends_in_sum = ends_in_sum
        if isinstance(output, Tensor) and (storage := output.untyped_storage())._cdata not in self._not_counted:
            largest, is_split = self._now.largest_bytes, storage._cdata in self.split
            largest[is_split] = max(largest[is_split], storage.nbytes())
        if flops := _flops(func._overloadpacket, args, kwargs or {}, output):
            operands = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            if any(one.untyped_storage()._cdata in self._weights for one in operands) or self._in_experts:
                self._now.weight_flops += flops
                self._now.expert_flops += flops * self._in_experts
            else:
                self._now.state_flops += flops
        return output

    @staticmethod
    def _called(func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            # Its shapes in fp32, in which it has a kernel on some devices, but no formula of shapes.
            return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).float()
        return func(*args, **kwargs)

    def attend(self, seen: Attention, num_pairs: int, by_document: bool) -> None:
        """Record a call of attention. num_pairs: of queries and keys, masked ones included; by_document: as `packs`."""
        self.packs &= by_document
        self._now.attention.append(seen)
        self._now.attention_products += num_pairs * seen.work.width

    def pack(self, tensor: Any) -> Any:
        """Count a tensor that autograd keeps, unless its storage has been counted."""
        if isinstance(tensor, Tensor) and not self._is_kept(tensor):
            self._keep(tensor)
            storage = tensor.untyped_storage()
            self._now.kept_bytes += storage.nbytes()
            self._now.split_bytes += storage.nbytes() * (storage._cdata in self.split)
        return tensor

    def _is_kept(self, tensor: Tensor) -> bool:
        """Return whether what a tensor holds is kept anyway: counted before, or a weight."""
        number = tensor.untyped_storage()._cdata
        return number in self._kept or number in self._not_counted

    def _keep(self, tensor: Tensor) -> None:
        self._kept.add(tensor.untyped_storage()._cdata)
        self._alive.append(tensor.untyped_storage())

    @contextmanager
    def watching(self, layers: list[nn.Module], marks: list[str]) -> Iterator[None]:
        """Note which layer runs, its linear layers' inputs, and whether it is at its experts.

        A layer equal to one that has run, on equal inputs, does not: what that one did is counted again. marks: equal
        for layers of the same modules and settings.
        """
        with ExitStack() as stack:
            for layer, mark, seen in zip(layers, marks, self.seen, strict=True):
                layer.forward = self._once(layer, mark, seen)  # an attribute of the instance, before that of the class
                stack.callback(delattr, layer, "forward")
                stack.callback(layer.register_forward_pre_hook(self._entering(seen), with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(self._leave).remove)
                for name, module in layer.named_modules():
                    if name.rpartition(".")[2] == "experts":
                        stack.callback(module.register_forward_pre_hook(lambda *_: self._at_experts(True)).remove)
                        stack.callback(module.register_forward_hook(lambda *_: self._at_experts(False)).remove)
                    if isinstance(module, nn.Linear | Conv1D):
                        stack.callback(module.register_forward_pre_hook(self._noting_input(seen, name)).remove)
            yield

    def _entering(self, seen: Seen) -> Any:
        def enter(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._now = seen
            first = next(iter(args or kwargs.values()), None)
            seen.input_bytes = first.untyped_storage().nbytes() if isinstance(first, Tensor) else 0
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            for one in tree_leaves((args[1:], others)):  # such as rotary angles, which all layers share
                if isinstance(one, Tensor):
                    self._not_counted.add(one.untyped_storage()._cdata)
                    self._alive.append(one)

        return enter

    def _leave(self, layer: nn.Module, given: Any, output: Any) -> None:
        self._now = self.outside
        self.split.leave(tree_leaves(output)[:1], type(layer).__name__)

    def _at_experts(self, inside: bool) -> None:
        self._in_experts = inside

    def _noting_input(self, seen: Seen, name: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor):
                storage = args[0].untyped_storage()
                self._alive.append(storage)
                seen.inputs[name] = storage._cdata

        return note

    def _once(self, layer: nn.Module, mark: str, seen: Seen) -> Callable[..., Any]:
        forward = layer.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            given = tree_leaves((args, kwargs))
            tensors = [one for one in given if isinstance(one, Tensor)]
            key = (mark, *map(self._mark, given))
            if (ran := self._ran.get(key)) is None:
                output = forward(*args, **kwargs)
                if isinstance(output, Tensor) and output.is_meta:
                    kept = [self._is_kept(one) for one in (*tensors, output)]
                    self._ran[key] = _Ran(seen, output.shape, output.stride(), output.dtype, output.requires_grad, kept)
                return output
            vars(seen).update(vars(ran.seen))
            # A copy, since the result of a layer may be changed in place, which a leaf that learns may not.
            made = torch.empty_strided(ran.shape, ran.stride, dtype=ran.dtype, device="meta", requires_grad=ran.learns)
            output = made.clone()
            for one, is_kept in zip((*tensors, output), ran.kept, strict=True):
                if is_kept and not self._is_kept(one):
                    self._keep(one)
            return output

        return run

    def _mark(self, given: Any) -> Any:
        """Return all about an argument of a layer that decides what the layer does with it."""
        if not isinstance(given, Tensor):
            return repr(given)
        values = None if given.is_meta else tuple(given.flatten().tolist())
        return given.shape, given.stride(), given.dtype, given.requires_grad, self._is_kept(given), values

    def finish(self) -> None:
        """Note which linear layers' inputs autograd has kept, once the forward pass is over."""
        for seen in self.seen:
            seen.kept_inputs = {name for name, storage in seen.inputs.items() if storage in self._kept}


def _flops(packet: Any, args: Any, kwargs: Any, output: Any) -> float:
    """Return an operation's FLOPs by torch's formulas, which lack products by groups of experts."""
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=output))
    if "grouped_mm" in packet._qualified_op_name:  # [rows, inputs] × [experts, inputs, outputs]
        return 2.0 * args[0].numel() * args[1].shape[-1]
    return 0.0


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    sliding_window: int | None = None,
    documents: bool = False,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Stand in for attention; Transformers calls it. query: [rows, heads, tokens, width]; documents: passed on."""
    rows, heads, num_queries, width = query.shape
    seen = Attention(heads, key.shape[1], width, value.shape[3], sliding_window)
    Walk.current.attend(seen, rows * num_queries * key.shape[2], documents and position_bias is None)
    return _Attention.apply(query, key, value), None


def walk(config: Any) -> ModelShape:
    """Return the shape of the model of a Transformers config; raise ModelError for one that makes no such model."""
    AttentionInterface.register(WALKED, attend)
    # It would look into tensors without data (Gemma 3n's feed-forward parts ask a normal distribution).
    torch.distributions.Distribution.set_default_validate_args(False)
    problem: Exception | None = None
    # Not every family's attention can be replaced, nor every model cut.
    for attention, cuts in ((WALKED, True), (WALKED, False), ("eager", True), ("eager", False)):
        try:
            return _Model(deepcopy(config), attention, cuts).shape()
        except (MemoryError, ModelError):
            raise
        except Exception as error:  # whatever Transformers makes of a config that it has never seen
            problem = error
    raise ModelError(
        f"measuring the layers of a {config.model_type} model from its {CONFIG_FILE}: {type(problem).__name__}: "
        f"{shortened(str(problem), LONGEST_REASON)}; the file is damaged, or for another version of Transformers"
    )


class _Model:
    """Model on the meta device, of which walks measure the layers. cuts: leave later layers of known kinds out."""

    def __init__(self, config: Any, attention: str, cuts: bool) -> None:
        self._model = _built(config, attention)
        self._model.tie_weights()
        self._is_replaced = attention == WALKED
        self._model.train()
        self._text = self._model.config.get_text_config()
        self._former = (*_NAMED_AS.get(_MODEL_TO_CONVERSION_PATTERN.get(config.model_type, ""), {}).items(),)
        layers = text_layers(self._model)
        self._num_layers = len(layers)
        names = {id(module): name for name, module in self._model.named_modules()}
        lists = [names[id(layer)].rpartition(".")[0] for layer in layers]
        self._places = [(prefix, lists.index(prefix)) for prefix in lists]
        """For each layer the name of the list that holds it, and how many layers come before that."""
        self._parameters = _own_parameters(layers)
        types = getattr(self._text, "layer_types", None) or ()
        self._types = [types[number] if number < len(types) else None for number in range(len(layers))]
        sizes = [[tuple(one.shape) for one in own.values()] for own in self._parameters]
        self._marks = [repr(mark) for mark in zip(map(signature, layers), self._types, sizes, lists, strict=True)]
        self._kinds = _kinds(self._marks)
        self._num_parameters = sum(one.numel() for one in self._model.parameters())
        embedding, head = self._model.get_input_embeddings().weight, self._model.get_output_embeddings().weight
        self._embedding_size, self._is_tied = embedding.shape, head is embedding
        self._layers = self._first(layers) if cuts else layers

    def shape(self) -> ModelShape:
        """Return the model's shape, from five walks: of two lengths, in two precisions, learning and frozen."""
        tokens = self._least_tokens()
        short, long, frozen = self._run(tokens), self._run(2 * tokens), self._run(2 * tokens, learns=False)
        self._model.float()
        wide, wide_frozen = self._run(2 * tokens), self._run(2 * tokens, learns=False)
        walks = short, long, frozen, wide, wide_frozen
        measured = [_Measured(tokens, *(one.seen[layers[0]] for one in walks)) for layers in self._kinds]
        kinds = tuple(self._kind(layers, one) for layers, one in zip(self._kinds, measured, strict=True))
        vocab_size, hidden_size = self._embedding_size
        of_layers = sum(len(one.layers) * (one.num_parameters + one.num_expert_parameters) for one in kinds)
        widest = max((one for kind in kinds for one in kind.attention), key=lambda one: one.work.width, default=None)
        experts = [one for kind in kinds for one in kind.stacked if one.place is LayerRole.OUT_OF_FFN]
        dense = [layer for kind in kinds if not kind.stacked for layer in kind.layers]
        return ModelShape(
            num_layers=self._num_layers,
            hidden_size=hidden_size,
            num_heads=widest.num_heads if widest else 1,
            num_kv_heads=widest.num_kv_heads if widest else 1,
            head_dim=widest.value_width if widest else 1,
            ffn_size=max((one.outputs for kind in kinds for one in kind.linears), default=hidden_size),
            vocab_size=vocab_size,
            family=self._model.config.model_type,
            tied_embeddings=self._is_tied,
            num_experts=experts[0].num_experts if experts else 0,
            experts_per_token=max(kind.experts_per_token for kind in kinds),
            expert_ffn_size=experts[0].inputs if experts else 0,
            dense_layers=frozenset(dense) if experts else frozenset(),
            max_positions=getattr(self._text, "max_position_embeddings", None),
            has_split_plan=splits_heads(self._text.base_model_tp_plan or {}, self._parameters),
            packs=long.packs and not any(one.pair_products for one in measured) and CHUNKED not in self._types,
            split_flaw=long.split.flaw or self._flaw_around_text(tokens),
            kinds=kinds,
            former_names=self._former,
            other_parameters=self._num_parameters - of_layers - (1 if self._is_tied else 2) * vocab_size * hidden_size,
            other_products=(long.outside.weight_flops - short.outside.weight_flops) / (2 * tokens),
        )

    def _first(self, layers: list[nn.Module]) -> list[nn.Module]:
        """Cut the model after the layer that shows the last kind; return the layers that are left."""
        end = max(2, 1 + max(numbers[0] for numbers in self._kinds))
        holders = [one for one in self._model.modules() if isinstance(one, nn.ModuleList) and [*one] == layers]
        for holder in holders:
            del holder[end:]
            self._text.num_hidden_layers = len(holder)
        return layers[:end] if holders else layers

    def _least_tokens(self) -> int:
        """Return the number of tokens of a short walk, a multiple of the chunks in which states are computed."""
        sizes = [
            value
            for name, value in vars(self._text).items()
            if name.endswith(("chunk_size", "block_size")) and "attention" not in name and isinstance(value, int)
        ]
        tokens = min(MOST_TOKENS, max([LEAST_TOKENS, *sizes]))
        # A family's own attention may have a table of as many positions.
        return tokens if self._is_replaced else min(tokens, (ModelFacts(vars(self._text)).max_positions or tokens) // 2)

    def _run(self, tokens: int, *, learns: bool = True, whole: bool = False) -> Walk:
        """Walk through the model with a row of tokens, with all weights learning or all frozen, as below an adapter.

        whole: through all that training runs for text, which in a model that sees surrounds the text's own decoder.
        """
        self._model.requires_grad_(learns)
        weights = {one.untyped_storage()._cdata: planned for one, planned in planned_weights(self._model)}
        constants = {one.untyped_storage()._cdata for one in self._model.buffers()}
        walk = Walk(len(self._layers), weights, constants, self._num_experts)
        Walk.current = walk
        decoder = parts_for_text(self._model)[0]
        if whole or decoder is self._model:
            decoder = decoder_of(self._model)
        parameters = inspect.signature(decoder.forward).parameters.values()
        passed = {"documents": True} if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters) else {}
        hook = self._model.get_input_embeddings().register_forward_hook(lambda *given: given[2].requires_grad_())
        try:
            marks = self._marks[: len(self._layers)]
            with walk.watching(self._layers, marks), saved_tensors_hooks(walk.pack, lambda kept: kept), walk:
                ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
                decoder(input_ids=ids, use_cache=False, **passed)
        finally:
            hook.remove()
        walk.finish()
        return walk

    def _flaw_around_text(self, tokens: int) -> str:
        """Return what around a seeing model's layers of text does not go with split weights; empty: nothing."""
        with suppress(Exception):  # of code beside towers that a walk cannot go through
            if parts_for_text(self._model)[0] is not self._model:
                return self._run(tokens, whole=True).split.flaw
        return ""

    @property
    def _num_experts(self) -> int:
        return max((one.num_experts for own in self._parameters for one in _stacked(own)), default=0)

    def _kind(self, layers: tuple[int, ...], measured: _Measured) -> LayerKind:
        own, module, (prefix, offset) = self._parameters[layers[0]], self._layers[layers[0]], self._places[layers[0]]
        in_experts = sum(one.numel() for name, one in own.items() if is_expert(name))
        splits = {id(one): planned.split for one, planned in planned_weights(self._model)}
        stacked = tuple(replace(one, split=splits[id(own[one.name])]) for one in _stacked(own))
        of_expert = sum(one.inputs * one.outputs for one in stacked if not one.is_router)
        routed = computed = 0
        if of_expert:
            computed = round(measured.expert_products / of_expert)
            known = getattr(self._text, "num_experts_per_tok", None)
            routed = known if isinstance(known, int) else computed
        attention = self._attention(measured, self._types[layers[0]])
        return LayerKind(
            layers=layers,
            prefix=prefix,
            offset=offset,
            num_parameters=sum(one.numel() for one in own.values()) - in_experts,
            num_expert_parameters=in_experts,
            experts_per_token=routed,
            experts_computed=max(routed, computed),
            products=measured.weight_products + (routed * of_expert if of_expert else measured.expert_products),
            state_products=measured.state_products,
            attention=attention,
            linears=tuple(
                replace(one, split=splits.get(id(module.get_parameter(f"{one.name}.weight"))))
                for one in measured.linears(module, self._embedding_size[1])
            ),
            stacked=(*stacked, *self._routers(own)) if stacked else (),
            ends_in_sum=measured.long.ends_in_sum,
            carries_state=not attention or any(isinstance(one, nn.Conv1d) for one in module.modules()),
            kept_bf16=measured.kept(measured.long, measured.frozen),
            kept_fp32=measured.kept(measured.wide, measured.wide_frozen),
            num_split_parameters=sum(
                one.numel() for name, one in own.items() if splits[id(one)] and not is_expert(name)
            ),
        )

    def _routers(self, own: dict[str, nn.Parameter]) -> Iterator[StackedParameter]:
        """Yield the matrix of a layer's router, if adapters may be put on it."""
        for name, one in own.items():
            if is_named(name, [end for _, end in self._former]) and one.ndim == 2:
                yield StackedParameter(name, LayerRole.INTO_FFN, one.shape[1], one.shape[0], 1, is_router=True)

    def _attention(self, measured: _Measured, layer_type: str | None) -> tuple[Attention, ...]:
        """Return a layer's attention as it was called, or, from its products, where it cannot be replaced."""
        if not measured.pair_products:
            if layer_type != CHUNKED:
                return tuple(measured.long.attention)
            return tuple(replace(one, window_tokens=self._text.attention_chunk_size) for one in measured.long.attention)
        heads = getattr(self._text, "num_attention_heads", None) or 1
        width = round(measured.pair_products / heads / 2)
        return (Attention(heads, getattr(self._text, "num_key_value_heads", None) or heads, width, width),)


def _kinds(marks: list[str]) -> list[tuple[int, ...]]:
    """Return the numbers of the layers of each kind: of equal modules, settings, own parameters and type."""
    kinds = [tuple(index for index, mark in enumerate(marks) if mark == kind) for kind in dict.fromkeys(marks)]
    if len(kinds) > MOST_KINDS:
        raise ModelError(f"the model has {len(kinds)} kinds of layers; the planner takes up to {MOST_KINDS}")
    return kinds


@dataclass(frozen=True)
class _Measured:
    """Records of a layer from walks of `tokens` and of twice as many. wide: in fp32; frozen: nothing learns."""

    tokens: int
    short: Seen
    long: Seen
    frozen: Seen
    wide: Seen
    wide_frozen: Seen

    @property
    def expert_products(self) -> float:
        """Number of weights of routed experts that a token is multiplied by."""
        return self.long.expert_flops / 2 / (2 * self.tokens)

    @property
    def weight_products(self) -> float:
        """Number of other weights that a token is multiplied by."""
        return self.long.weight_flops / 2 / (2 * self.tokens) - self.expert_products

    @property
    def pair_products(self) -> float:
        """Number of multiplications for each pair of tokens, in products that no kernel of attention computes."""
        return self._by_pairs(self.short.state_flops / 2, self.long.state_flops / 2)

    @property
    def state_products(self) -> float:
        """Number of multiplications per token in products without weights, except for each pair of tokens."""
        return self.long.state_flops / 2 / (2 * self.tokens) - self.pair_products * 2 * self.tokens

    def kept(self, learning: Seen, frozen: Seen) -> KeptBytes:
        by_scores = self._by_pairs(self.short.kept_bytes, self.long.kept_bytes) if self.pair_products else 0.0
        of_scores = by_scores * 2 * self.tokens
        trained, below = (max(0.0, one.kept_bytes / (2 * self.tokens) - of_scores) for one in (learning, frozen))
        largest = [0.0 if by_scores else one / (2 * self.tokens) for one in learning.largest_bytes]
        split, split_below = (one.split_bytes / (2 * self.tokens) for one in (learning, frozen))
        return KeptBytes(trained, below, by_scores, largest[0], split, split_below, largest[1])

    def linears(self, layer: nn.Module, hidden_size: int) -> tuple[Linear, ...]:
        """Return a layer's linear layers, with their inputs as the backward pass needs them."""
        sources = [*dict.fromkeys(self.long.inputs.values())]
        return tuple(
            Linear(
                name,
                LayerRole.of(name, inputs, outputs, hidden_size),
                inputs,
                outputs,
                source=sources.index(self.long.inputs[name]) if name in self.long.inputs else None,
                keeps_input=name in self.long.kept_inputs - self.frozen.kept_inputs,
            )
            for name, (inputs, outputs) in _linear_sizes(layer)
        )

    def _by_pairs(self, short: float, long: float) -> float:
        """Return how much of a measure there is for each pair of tokens; 0 where it is so little as padding adds."""
        found = (long - 2 * short) / (2 * self.tokens**2)
        return found if found >= LEAST_BY_PAIR else 0.0


def _built(config: Any, attention: str) -> Any:
    """Return the model that training reads: of language, else of pictures and text, whose text part is measured."""
    head: Head | None = next((one for one in HEADS if class_with_head(config, one)), None)
    if head is None:
        raise ModelError(f"measuring the layers of a {config.model_type} model: Transformers has none that writes text")
    with no_init_weights():
        return build_model(config, head=head, dtype=torch.bfloat16, attn_implementation=attention)


def _own_parameters(layers: list[nn.Module]) -> list[dict[str, nn.Parameter]]:
    """Return each layer's parameters by name; what several layers share belongs to the first."""
    met: set[int] = set()
    by_layer = []
    for layer in layers:
        by_layer.append({name: one for name, one in layer.named_parameters() if id(one) not in met})
        met |= {id(one) for one in by_layer[-1].values()}
    return by_layer


def _stacked(own: dict[str, nn.Parameter]) -> tuple[StackedParameter, ...]:
    """Return the matrices of a layer's routed experts."""
    stacks = []
    for name, one in own.items():
        if is_expert(name) and one.ndim == 3:
            place = LayerRole.OUT_OF_FFN if "down" in name or "output" in name else LayerRole.INTO_FFN
            number, rows, columns = one.shape  # some models hold [inputs, outputs], others the reverse
            stacks.append(StackedParameter(name, place, rows, columns, number, has_bias=f"{name}_bias" in own))
    return tuple(stacks)


def _linear_sizes(layer: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name, and inputs and outputs, of each linear layer in a layer."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            yield name, (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            yield name, (module.nx, module.nf)
