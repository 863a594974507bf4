"""Whether what is served is what was trained: recorded documents' log-probabilities, asked of the running server.

An adapter can be lost on its way in silence: loaded but of no effect, left out by name, or another in its slot. So
each is also compared with its base in the same server: one that is nearer to its base than to what training recorded
does nothing, and that is an error. How far a whole model may be from its record depends on its precision; that is
measured, and a gate of the promotion bounds it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stages.core.errors import ServerError
from stages.models.recorded import RECORD, RecordedDocument, differences, read_record
from stages.serving.client import Client
from stages.serving.launch import LaunchSpec


@dataclass(frozen=True)
class Agreement:
    """Of one served model, in nats per target token. most: of the document that differs most. mean: over all tokens.

    from_base: of an adapter, how far its documents are from those of its base, over all tokens.
    """

    num_documents: int
    most: float
    mean: float
    from_base: float | None = None


def compare_with_records(
    client: Client, spec: LaunchSpec, names: Collection[str], context_tokens: int, base_name: str | None = None
) -> dict[str, Agreement]:
    """Name in requests → how the server agrees with the record beside the folder that it serves, where there is one.

    client: of the server of `spec`. names: those of its models to compare. base_name: what answers as the base of its
    adapters does; default: the base. Documents that do not fit into `context_tokens` are left out. Raises ServerError
    for a model that is not listed, and an adapter that does nothing.
    """
    listed = client.model_names()
    if missing := sorted(set(names) - set(listed)):
        raise ServerError(f"the server at {client.url} does not list {', '.join(missing)}; it has {', '.join(listed)}")
    found: dict[str, Agreement] = {}
    for name in names:
        artifact = spec.folders[name].parent
        if (artifact / RECORD).is_file():
            documents = [one for one in read_record(artifact) if one.num_targets and len(one.tokens) < context_tokens]
            found |= {name: _compare(client, spec, name, documents, base_name or spec.own_name)} if documents else {}
    return found


def agreement_metrics(agreements: Mapping[str, Agreement], served_name: str) -> dict[str, float]:
    """`max_abs_logprob_difference` and `mean_…` of what is asked for; those of other names end with `_NAME`."""
    metrics: dict[str, float] = {}
    for name, one in sorted(agreements.items(), key=lambda item: item[0] != served_name):
        end = "" if name == served_name else f"_{name}"
        metrics |= {f"max_abs_logprob_difference{end}": one.most, f"mean_abs_logprob_difference{end}": one.mean}
    return metrics


def _compare(
    client: Client, spec: LaunchSpec, name: str, documents: Sequence[RecordedDocument], base_name: str
) -> Agreement:
    served = _sums(replace(client, model=name), documents)
    found = differences(served, documents)
    if name not in spec.adapters:
        return Agreement(len(documents), found.most, found.mean)
    base = _sums(replace(client, model=base_name), documents)
    num_targets = sum(one.num_targets for one in documents)
    from_base = sum(abs(one - other) for one, other in zip(served, base, strict=True)) / num_targets
    if from_base <= found.mean:
        raise ServerError(
            f"the adapter {name} does nothing where it is served: over {len(documents)} recorded documents its "
            f"log-probabilities are {from_base:.3g} nats per token from those of its base {spec.own_name}, and "
            f"{found.mean:.3g} from those that training recorded; see the server's log for layers that it left out, or "
            "serve what a stage of `kind: merge` makes of it"
        )
    return Agreement(len(documents), found.most, found.mean, from_base)


def _sums(client: Client, documents: Sequence[RecordedDocument]) -> list[float]:
    """Of each document, the sum of its targets' log-probabilities as they are served."""
    rows = client.score([one.tokens for one in documents])
    return [
        sum(value for value, target in zip(row, one.targets, strict=False) if target >= 0)
        for row, one in zip(rows, documents, strict=True)
    ]
