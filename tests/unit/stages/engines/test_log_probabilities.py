"""Log-probabilities computed in chunks equal those from all logits, gradients included, but never hold all logits."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.compile_fx import compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stages.data.batch import IGNORED, target_positions
from stages.engines import log_probabilities
from stages.engines.log_probabilities import (
    LogitsTransform,
    OutputHead,
    greedy_tokens,
    likeliest_tokens,
    tempered,
    token_log_probabilities,
)
from stages.engines.logits_transform import logits_transform
from stages.models.loading import build_model
from tests.fake_gpu.devices import fake_gpus
from tests.fake_gpu.recorder import Recorder
from tests.zoo.models import FAMILIES, tiny_config

ROWS, SEQUENCE, WIDTH, VOCABULARY = 2, 24, 16, 50


SOFTCAP = LogitsTransform(softcap=0.5)


def softcapped(logits: Tensor) -> Tensor:
    return 0.5 * torch.tanh(logits / 0.5)


@pytest.fixture
def targets() -> Tensor:
    torch.manual_seed(1)
    targets = torch.randint(VOCABULARY, (ROWS, SEQUENCE))
    return targets.masked_fill(torch.rand(ROWS, SEQUENCE) < 0.6, IGNORED)


@pytest.fixture
def hidden() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(ROWS, SEQUENCE, WIDTH, requires_grad=True)


def head(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)


def values_of(hidden: Tensor, module: nn.Linear, wanted: Tensor, transform: LogitsTransform | None = None) -> Tensor:
    head = OutputHead(module.weight, module.bias, transform or LogitsTransform())
    return token_log_probabilities(hidden, head, wanted, positions_of(wanted))


def positions_of(wanted: Tensor) -> Tensor:
    return target_positions(wanted if wanted.dim() == 2 else wanted[..., 0])


def plain(hidden: Tensor, head: nn.Linear, targets: Tensor, transform: Callable[[Tensor], Tensor] | None) -> Tensor:
    logits = head(hidden).float()
    logits = transform(logits) if transform else logits
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(targets == IGNORED, 0.0)


def gradients_of(result: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(4)
    return torch.autograd.grad((result * torch.randn(result.shape)).sum(), inputs)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("transform", [None, SOFTCAP], ids=["plain", "softcapped"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_equal_to_log_softmax_with_gradients(
    hidden: Tensor,
    targets: Tensor,
    chunk_tokens: int,
    transform: LogitsTransform | None,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    module = head(bias=bias)
    found = values_of(hidden, module, targets, transform)
    expected = plain(hidden, module, targets, softcapped if transform else None)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    inputs = (hidden, *module.parameters())
    for one, other in zip(gradients_of(found, *inputs), gradients_of(expected, *inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
def test_greedy_tokens_are_the_likeliest_where_there_is_a_target(
    hidden: Tensor, targets: Tensor, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    module = head(bias=True)
    expected = module(hidden).argmax(-1).masked_fill(targets == IGNORED, IGNORED)
    head_of = OutputHead(module.weight, module.bias)
    assert torch.equal(greedy_tokens(hidden, head_of, targets, positions_of(targets)), expected)
    nothing = torch.full_like(targets, IGNORED)
    assert torch.equal(greedy_tokens(hidden, head_of, nothing, positions_of(nothing)), nothing)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_several_tokens_of_a_position_are_given_with_gradients(
    hidden: Tensor, targets: Tensor, chunk_tokens: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of a position's tokens, perhaps one twice, have the right values and gradients."""
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    module = head()
    others = torch.stack([targets, torch.zeros_like(targets), torch.ones_like(targets)], -1).clamp(min=0)
    wanted = torch.cat([targets.unsqueeze(-1), others], -1)
    wanted[..., 1:][targets == IGNORED] = 7  # candidates where no target is
    wanted[..., 0] = targets
    found = values_of(hidden, module, wanted, tempered(SOFTCAP, temperature))
    values = (softcapped(module(hidden)) / temperature).log_softmax(-1).gather(-1, wanted.clamp(min=0))
    expected = values * (targets != IGNORED).unsqueeze(-1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    inputs = (hidden, module.weight)
    for one, other in zip(gradients_of(found, *inputs), gradients_of(expected, *inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 1000])
@pytest.mark.parametrize("number", [1, 5, VOCABULARY])
def test_the_likeliest_tokens_are_those_of_the_whole_softmax(
    hidden: Tensor, targets: Tensor, chunk_tokens: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    module = head(bias=True)
    values, tokens = softcapped(module(hidden)).log_softmax(-1).topk(number)
    expected = torch.stack([tokens.float(), values], 2) * (targets != IGNORED)[..., None, None]
    head_of = OutputHead(module.weight, module.bias, SOFTCAP)
    found = likeliest_tokens(hidden, head_of, targets, positions_of(targets), number=number)
    torch.testing.assert_close(found, expected)


def test_chunks_do_not_add_up_in_half_precision(
    hidden: Tensor, targets: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, exact = head(dtype=torch.bfloat16), head()
    exact.weight.data.copy_(module.weight.data)
    halved = hidden.detach().bfloat16().requires_grad_()
    (whole,) = gradients_of(values_of(halved, module, targets), module.weight)
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", VOCABULARY)
    (chunked,) = gradients_of(values_of(halved, module, targets), module.weight)
    (expected,) = gradients_of(plain(halved.float(), exact, targets, None), exact.weight)
    assert whole.dtype == chunked.dtype == torch.bfloat16
    error_of_whole, error_of_chunked = ((found.float() - expected).norm() for found in (whole, chunked))
    assert error_of_chunked < 2 * error_of_whole  # sums in bf16 are 3.5 times as far off already here


@pytest.mark.parametrize("chunk_tokens", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2])
def test_confident_tokens_keep_their_digits(
    chunk_tokens: int, dtype: torch.dtype, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities near -1e-6 and their gradients are within two fp32 roundings near 1 of float64's.

    A difference from the logarithm of the whole sum, which is near 40 here, would be off by up to 3.6e-6.
    """
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    torch.manual_seed(5)
    # Hidden state i picks column i of the head: logits are exact in each dtype.
    states = torch.eye(WIDTH, dtype=dtype)[None]
    weight = (22 + 3 * torch.rand(VOCABULARY, WIDTH)).to(dtype)
    wanted = torch.randint(VOCABULARY, (1, WIDTH))
    weight[wanted[0], torch.arange(WIDTH)] += 18
    exact = weight.double().requires_grad_()
    expected = exact.T.log_softmax(-1).gather(-1, wanted[0, :, None])[:, 0]
    assert -1e-5 < expected.min() < expected.max() < -1e-8
    (expected_gradient,) = torch.autograd.grad(expected.sum(), exact)

    def results(group: Any) -> tuple[Tensor, Tensor]:
        entries = VOCABULARY // tp
        first = group.rank() * entries if group else 0
        own = weight[first : first + entries].clone().requires_grad_()
        head_of = OutputHead(own, group=group)
        values = token_log_probabilities(states, head_of, wanted, torch.arange(WIDTH))
        likeliest = likeliest_tokens(states, head_of, wanted, torch.arange(WIDTH), number=1)
        assert torch.equal(likeliest[..., 1, 0], values)
        return values[0].detach(), torch.autograd.grad(values.sum(), own)[0]

    found = on_threads(tp, results) if tp > 1 else [results(None)]
    for values, _ in found:
        torch.testing.assert_close(values.double(), expected.detach(), atol=2.4e-7, rtol=1e-5)
    gradient = torch.cat([one for _, one in found])
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=2.4e-7, rtol=0.004)


def test_no_target_gives_zeros_and_zero_gradients(hidden: Tensor) -> None:
    module = head(bias=True)
    result = values_of(hidden, module, torch.full((ROWS, SEQUENCE), IGNORED))
    assert not result.any()
    assert not any(gradient.any() for gradient in gradients_of(result, hidden, *module.parameters()))


class LargestTensor(TorchDispatchMode):
    """PyTorch dispatch mode that records the number of elements of the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


def test_logits_exist_for_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_logits = 2 * 4000
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_logits)
    module = nn.Linear(1, 4000, bias=False)
    hidden = torch.randn(1, 25, 1, requires_grad=True)  # 25 × 320 logits are a chunk
    with LargestTensor() as largest:
        values_of(hidden, module, torch.zeros(1, 25, dtype=torch.int64)).sum().backward()
    assert largest.num_elements == chunk_logits


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("transform", [LogitsTransform(), SOFTCAP], ids=["plain", "softcapped"])
def test_ranks_that_split_a_padded_vocabulary_give_what_one_gives(
    hidden: Tensor, targets: Tensor, chunk_tokens: int, transform: LogitsTransform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    module, ranks, entries = head(bias=True), 4, 17  # the third rank has an entry of padding, the fourth no other
    weights = nn.functional.pad(module.weight.detach(), (0, 0, 0, ranks * entries - VOCABULARY), value=1.0)
    biases = nn.functional.pad(module.bias.detach(), (0, ranks * entries - VOCABULARY), value=9.0)
    wanted = torch.stack([targets, torch.zeros_like(targets), torch.ones_like(targets)], -1)
    positions, factors = positions_of(wanted), torch.randn(wanted.shape)

    def results(group: Any) -> tuple[Tensor, ...]:
        own = slice(group.rank() * entries, (group.rank() + 1) * entries)
        weight, bias, states = (one.clone().requires_grad_() for one in (weights[own], biases[own], hidden.detach()))
        share = OutputHead(weight, bias, transform, group, VOCABULARY)
        values = token_log_probabilities(states, share, wanted, positions)
        likeliest = likeliest_tokens(states, share, wanted, positions, number=20)
        greedy = greedy_tokens(states, share, wanted, positions)
        gradients = torch.autograd.grad((values * factors).sum(), (states, weight, bias))
        return (values.detach(), likeliest, greedy, *gradients)

    found = on_threads(ranks, results)
    whole = OutputHead(module.weight, module.bias, transform)
    expected = token_log_probabilities(hidden, whole, wanted, positions)
    inputs = (hidden, module.weight, module.bias)
    states_gradient, weight_gradient, bias_gradient = torch.autograd.grad((expected * factors).sum(), inputs)
    for values, likeliest, greedy, *_ in found:
        torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(likeliest, likeliest_tokens(hidden, whole, wanted, positions, number=20))
        assert torch.equal(greedy, greedy_tokens(hidden, whole, wanted, positions))
    of_states, of_weights, of_biases = zip(*(one[3:] for one in found), strict=True)
    torch.testing.assert_close(sum(of_states), states_gradient, atol=1e-6, rtol=1e-5)
    for parts, gradient in ((of_weights, weight_gradient), (of_biases, bias_gradient)):
        torch.testing.assert_close(torch.cat(parts)[:VOCABULARY], gradient, atol=1e-6, rtol=1e-5)
        assert not torch.cat(parts)[VOCABULARY:].any()


def on_threads(num_ranks: int, function: Callable[[Any], Any]) -> list[Any]:
    """Call a function with the process group on each of its ranks, which are threads; return the results in order."""
    store = dist.HashStore()

    def of_rank(rank: int) -> Any:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            return function(dist.group.WORLD)
        except BaseException as error:
            ProcessLocalGroup.exception_handle(error)  # or the other ranks would wait for this one
            raise
        finally:
            dist.destroy_process_group()

    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with ThreadPoolExecutor(num_ranks) as ranks:
            return list(ranks.map(of_rank, range(num_ranks)))
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()


TOKENS, ENTRIES = 4096, 151_936


@pytest.mark.parametrize(
    ("transform", "dtype", "most"),
    [
        (LogitsTransform(), torch.bfloat16, 8),
        (LogitsTransform(), torch.float32, 8),
        (LogitsTransform(0.7, 30.0), torch.bfloat16, 10),
        (LogitsTransform(0.7, 30.0), torch.float32, 12),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_few_bytes_of_a_logit_are_alive(transform: LogitsTransform, dtype: torch.dtype, most: int, tp: int) -> None:
    with fake_gpus(tp), Recorder() as recorder:
        hidden, weight = (torch.empty(*size, 64, dtype=dtype, requires_grad=True) for size in ((1, TOKENS), (ENTRIES,)))
        wanted = torch.zeros(1, TOKENS, dtype=torch.int64)
        positions = torch.arange(TOKENS)
        before = recorder.live_bytes
        head = OutputHead(weight, transform=transform, group=dist.group.WORLD if tp > 1 else None)
        token_log_probabilities(hidden, head, wanted, positions).sum().backward()
        # Besides logits: hidden states and their gradients, the head's gradient, and some numbers of each token.
        others = (2 * weight.itemsize + 8) * hidden.numel() + weight.nbytes + 64 * TOKENS
    alive = recorder.peak_bytes - before
    assert alive <= most * log_probabilities.CHUNK_LOGITS + others
    assert alive > (most - 1) * log_probabilities.CHUNK_LOGITS


class ResultsOfShape(TorchDispatchMode):
    """PyTorch dispatch mode that keeps all results of operations that have a given shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        self.results: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.results += [one for one in tree_leaves(result) if isinstance(one, Tensor) and one.shape == self.shape]
        return result


@pytest.mark.parametrize("chunk_tokens", [1, 1000])
def test_the_gradient_of_the_head_is_one_tensor_in_its_dtype(
    hidden: Tensor, targets: Tensor, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_tokens * VOCABULARY)
    module = head(dtype=torch.bfloat16)
    values = values_of(hidden.bfloat16(), module, targets)
    with ResultsOfShape(module.weight.shape) as seen:
        (gradient,) = torch.autograd.grad(values.sum(), module.weight)
    weight = module.weight.untyped_storage().data_ptr()
    made = {one.untyped_storage().data_ptr() for one in seen.results} - {weight}
    assert made == {gradient.untyped_storage().data_ptr()}


@pytest.mark.parametrize("transform", [LogitsTransform(), LogitsTransform(0.7, 0.5)], ids=["plain", "softcapped"])
def test_compiled_kernels_give_the_same_and_are_compiled_once(
    transform: LogitsTransform, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = CompileCounterWithBackend("aot_eager")
    compiled = {
        function: torch.compile(function, dynamic=True, fullgraph=True, backend=counting)
        for function in (log_probabilities._reduced, log_probabilities._output_gradient)
    }
    monkeypatch.setattr(log_probabilities, "_compiled", compiled.__getitem__)
    weight = head().weight
    for length, chunk_logits in ((24, 1000), (30, 250), (17, 300)):
        monkeypatch.setattr(log_probabilities, "CHUNK_LOGITS", chunk_logits)
        states, wanted = torch.randn(2, length, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (2, length))
        found, expected = (
            token_log_probabilities(states, head_of, wanted, positions_of(wanted))
            for head_of in (OutputHead(weight, transform=transform, compiles=one) for one in (True, False))
        )
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        of_found, of_expected = (gradients_of(values, states, weight) for values in (found, expected))
        torch.testing.assert_close(of_found, of_expected, atol=1e-6, rtol=1e-5)
    # without empty graphs, of which torch makes one
    assert len([one for one in counting.graphs if one.graph.find_nodes(op="placeholder")]) == len(compiled)


def test_sixteen_bytes_of_a_logit_go_to_and_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own count of bytes that its kernels access, with those of the products, is at most 16 a logit."""
    counted: Counter[str] = Counter()

    def count(graph_module: Any, example_inputs: Any, **_: Any) -> Any:
        record_original_output_strides(graph_module)
        graph = GraphLowering(graph_module, shape_env=V.fake_mode.shape_env)
        with V.set_graph_handler(graph), V.set_real_inputs(example_inputs), V.set_debug_handler(DebugContext()):
            graph.run(*example_inputs)
            graph._update_scheduler()
            counted["kernels"] += graph.count_bytes()[0]
        return make_boxed_func(graph_module.forward)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=True, backend=partial(compile_fx, inner_compile=count))

    monkeypatch.setattr(log_probabilities, "_compiled", compiled)
    tokens, entries = 512, 4096
    hidden, weight = (torch.randn(*size, 8).bfloat16().requires_grad_() for size in ((1, tokens), (entries,)))
    wanted = torch.zeros(1, tokens, dtype=torch.int64)
    token_log_probabilities(hidden, OutputHead(weight, compiles=True), wanted, torch.arange(tokens)).sum().backward()
    # Products write the head's output twice, in either pass, and read its gradient twice, in two bytes each.
    assert 4 * 2 + counted["kernels"] / (tokens * entries) <= 16


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}, LogitsTransform(softcap=30.0)),
        ("recurrent_gemma", {"logits_soft_cap": 20.0}, LogitsTransform(softcap=20.0)),
        ("cohere", {"logit_scale": 0.0625}, LogitsTransform(0.0625)),
        ("granite", {"logits_scaling": 8.0}, LogitsTransform(0.125)),
        ("falcon_h1", {"lm_head_multiplier": 0.3}, LogitsTransform(0.3)),
        ("minicpm3", {"dim_model_base": 32}, LogitsTransform(0.5)),  # before the head
        ("hyperclovax", {"logits_scaling": 3.0}, LogitsTransform(3.0)),
        ("mamba2", {}, LogitsTransform()),  # whose code computes them in the head's dtype
        ("qwen3_next", {}, LogitsTransform()),
    ],
)
def test_what_models_do_to_their_logits_is_measured(
    family: str, fields: dict[str, Any], expected: LogitsTransform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "hyperclovax", FAMILIES["granite"])  # of no test else
    model = build_model(tiny_config(family, **fields))
    assert logits_transform(model) == expected
    assert not [one for one in model.modules() if "forward" in vars(one)], "the model's own code is back"


def test_a_soft_cap_of_scaled_logits_is_measured_and_what_is_neither_is_left_alone() -> None:
    class Odd(nn.Module):
        def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.base_model, self.head, self.change = nn.Embedding(2, 1), nn.Linear(1, 1), change

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=self.change(self.head(self.base_model(input_ids)[0])))

    found = logits_transform(Odd(lambda logits: 20 * torch.tanh(0.2 * logits / 20)))
    assert (found.scale, found.softcap) == (pytest.approx(0.2), pytest.approx(100))
    for change in (torch.sigmoid, torch.relu, torch.exp, lambda logits: logits + 1):
        assert logits_transform(Odd(change)) == LogitsTransform()


def test_a_temperature_divides_what_a_model_makes_of_its_logits(hidden: Tensor, targets: Tensor) -> None:
    for transform in (LogitsTransform(), SOFTCAP):
        found = values_of(hidden, head(), targets, tempered(transform, 0.7))
        own = softcapped if transform.softcap else torch.clone
        expected = plain(hidden, head(), targets, lambda logits, own=own: own(logits) / 0.7)
        assert torch.allclose(found, expected, atol=1e-5)
