"""Whether what is served is what was trained: predictions of recorded documents, asked of the running server.

An adapter can be lost on its way in silence: loaded but of no effect, left out by name, or another in its slot. So
each is also compared with its base in the same server: one that is nearer to its base than to what training recorded
does nothing, and that is an error. How far a whole model may be from its record depends on its precision; that is
measured, and a gate of the promotion bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stages.core.errors import ServerError
from stages.core.numbers import counted
from stages.models.recorded import RECORD, Differences, Predicted, RecordedDocument, differences, read_record
from stages.serving.client import Client
from stages.serving.engine import Engine
from stages.serving.launch import LaunchSpec
from stages.serving.registry import engine_of


@dataclass(frozen=True)
class Agreement:
    """Of one served model. from_base: of an adapter, by how many nats per target token the log-probabilities of its
    documents are from those of its base."""

    num_documents: int
    from_training: Differences
    from_base: float | None = None


def compare_with_records(
    client: Client,
    spec: LaunchSpec,
    names: Collection[str],
    context_tokens: int,
    warn: Callable[[str], None],
    base_name: str | None = None,
) -> dict[str, Agreement]:
    """Name in requests → how the server agrees with the record beside the folder that it serves, where there is one.

    client: of the server of `spec`. names: those of its models to compare. base_name: what answers as the base of its
    adapters does; default: the base. Documents that do not fit into `context_tokens` are left out; warn: gets why all
    are. Raises ServerError for a model that is not listed, and an adapter that does nothing.
    """
    listed = client.model_names()
    if missing := sorted(set(names) - set(listed)):
        raise ServerError(f"the server at {client.url} does not list {', '.join(missing)}; it has {', '.join(listed)}")
    recorded = [name for name in names if (spec.folders[name].parent / RECORD).is_file()]
    engine = engine_of(spec.engine)
    if recorded and not engine.capabilities.token_prompts:
        warn(
            f"{', '.join(recorded)}: whether what is served is what was trained is not known, since {engine.title} "
            "takes no prompts of token ids"
        )
        return {}
    found: dict[str, Agreement] = {}
    for name in recorded:
        records = read_record(spec.folders[name].parent)
        documents = [one for one in records if one.num_targets and len(one.tokens) < context_tokens]
        found |= {name: _compare(client, spec, name, documents, base_name or spec.own_name)} if documents else {}
    return found


def agreement_metrics(agreements: Mapping[str, Agreement], served_name: str) -> dict[str, float]:
    """Differences of what is asked for, by their names; those of other names end with `_NAME`."""
    metrics: dict[str, float] = {}
    for name, one in sorted(agreements.items(), key=lambda item: item[0] != served_name):
        end = "" if name == served_name else f"_{name}"
        metrics |= {f"{metric}{end}": value for metric, value in one.from_training.metrics().items()}
    return metrics


def _compare(
    client: Client, spec: LaunchSpec, name: str, documents: Sequence[RecordedDocument], base_name: str
) -> Agreement:
    engine = engine_of(spec.engine)
    served = _predictions(engine, replace(client, model=name), documents)
    found = differences(served, documents)
    if name not in spec.adapters:
        return Agreement(len(documents), found)
    base = _predictions(engine, replace(client, model=base_name), documents)
    apart = [abs(_sum(one) - _sum(other)) for one, other in zip(served, base, strict=True)]
    from_base = sum(apart) / sum(one.num_targets for one in documents)
    if from_base <= found.mean:
        raise ServerError(
            f"the adapter {name} does nothing where it is served: over {counted(len(documents), 'recorded document')} "
            f"its log-probabilities are {from_base:.3g} nats per token from those of its base {spec.own_name}, and "
            f"{found.mean:.3g} from those that training recorded; see the server's log for layers that it left out, or "
            "serve what a stage of `kind: merge` makes of it"
        )
    return Agreement(len(documents), found, from_base)


def _predictions(engine: Engine, client: Client, documents: Sequence[RecordedDocument]) -> list[Predicted]:
    """Of each document's targets, as they are served."""
    rows = engine.predictions(client, [one.tokens for one in documents])
    return [_of_targets(row, one) for row, one in zip(rows, documents, strict=True)]


def _of_targets(row: Predicted, document: RecordedDocument) -> Predicted:
    places = [place for place, target in enumerate(document.targets) if target >= 0]
    greedy = [row.greedy[place] for place in places] if row.greedy else ()
    return Predicted([row.log_probabilities[place] for place in places], greedy)


def _sum(predicted: Predicted) -> float:
    return math.fsum(predicted.log_probabilities)
