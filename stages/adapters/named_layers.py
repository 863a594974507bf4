"""Check that a model has the layers that adapter options name, by the headers of its files: milliseconds, no torch.

Only of dense models with Transformers' names; of others the check of inputs builds the model.
"""

import difflib
from collections.abc import Iterator

from stages.adapters.config import AdapterConfig
from stages.core.errors import ModelError
from stages.core.redaction import quoted
from stages.models.adapter_targets import AdapterTargets, is_named
from stages.models.facts import ModelFacts
from stages.models.linear_layers import linear_layers, read_projections

NUM_NAMED = 3


def missing_layers(adapter: AdapterConfig, facts: ModelFacts) -> Iterator[str]:
    """Yield an error for each adapter option with names of layers that the model lacks."""
    try:
        shape = facts.shape
    except ModelError:
        return
    widths = {layer.name: min(layer.output_size, layer.input_size) for layer in read_projections(facts.folder)}
    known = {layer.name for number in range(shape.num_layers) for layer in linear_layers(shape, number)}
    if shape.num_mixture_layers or not known <= widths.keys() or facts.config.get("auto_map"):
        return
    layers = adapter.layers_to_transform or ()
    if beyond := [str(number) for number in layers if number >= shape.num_layers]:
        last = shape.num_layers - 1
        yield f"adapter.layers_to_transform names {', '.join(beyond)}; the model's layers are 0 to {last}"
    if isinstance(adapter.target_modules, tuple):
        modules = {".".join(name.split(".")[: depth + 1]) for name in widths for depth in range(name.count(".") + 1)}
        ends = sorted({name.rpartition(".")[2] for name in known})
        for target in adapter.target_modules:
            if not any(is_named(module, [target]) for module in modules):
                close = difflib.get_close_matches(target, ends, n=1)
                meant = f"; did you mean {close[0]}? Its" if close else "; its"
                yield (
                    f"adapter.target_modules names {quoted(target, 100)}, which the model does not have{meant} "
                    f"linear layers are called {', '.join(ends)}"
                )
    targets = AdapterTargets(adapter, {})
    narrow = sorted(name for name in known if targets.has_layer(name) and widths[name] < adapter.highest_rank)
    if narrow:
        named = ", ".join(f"{name} ({widths[name]})" for name in narrow[:NUM_NAMED])
        yield f"adapter.rank is {adapter.highest_rank}, more than the width of {named}; lower it"
