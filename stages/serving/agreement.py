"""Comparison of a served model with what its training recorded: predictions of tokens, and prompts that offer tools.

An adapter can be lost in silence: loaded but of no effect, left out by name, or another in its slot. So one that is
nearer to its base in the same server than to what training recorded is an error. How far a whole model may be from its
record depends on its precision; a gate of the promotion bounds it.

A prompt with tools is rendered by the server: tokens other than the learned ones are a warning, and a metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from stages.core.errors import ModelError, ServerError
from stages.core.lines import counted
from stages.core.redaction import quoted
from stages.data.media.addresses import size_of_address
from stages.models.media import MediaError
from stages.models.processor import MediaProcessor
from stages.models.recorded import (
    PICTURE_PROMPTS,
    RECORD,
    TOOL_PROMPTS,
    Differences,
    Predicted,
    RecordedDocument,
    ToolPrompt,
    differences,
    read_record,
    read_tool_prompts,
)
from stages.serving.backend import EngineAddress
from stages.serving.client import Client
from stages.serving.engine import Engine, LaunchSpec, SeenDocument
from stages.serving.recorded_chats import messages_of
from stages.serving.registry import engine_of

SHOWN_TOKENS, SHOWN_CHARACTERS = 24, 100


@dataclass(frozen=True)
class Agreement:
    """Differences of a served model's predictions from training's record.

    differing_tool_prompts, differing_picture_prompts: number of prompts that the server renders to other tokens; None
    if there are none.
    """

    num_documents: int
    from_training: Differences
    differing_tool_prompts: int | None = None
    differing_picture_prompts: int | None = None

    def metrics(self) -> dict[str, float]:
        """Return the differences between server and training as MLflow metrics, by metric name."""
        prompts = {TOOL_PROMPTS: self.differing_tool_prompts, PICTURE_PROMPTS: self.differing_picture_prompts}
        counts = {name: float(number) for name, number in prompts.items() if number is not None}
        return {**self.from_training.metrics(), **counts}


def compare_with_records(
    client: Client,
    spec: LaunchSpec,
    names: Collection[str],
    context_tokens: int,
    warn: Callable[[str], None],
    base_name: str | None = None,
    *,
    address: EngineAddress | None = None,
) -> dict[str, Agreement]:
    """Compare served models with the predictions that their training recorded, if any; return them by model name.

    client: of the server of `spec`. names: models of the server to compare. base_name: model that adapters are compared
    with; default: their base. warn: gets the reason if no document is compared; those that do not fit into
    `context_tokens` are left out. address: of the engine itself, without which documents with pictures are left out.
    Raises ServerError for unlisted models, adapters without effect, and pictures that become other tokens.
    """
    listed = client.model_names()
    if missing := sorted(set(names) - set(listed)):
        raise ServerError(f"the server at {client.url} does not list {', '.join(missing)}; it has {', '.join(listed)}")
    recorded = [name for name in names if (spec.folders[name].parent / RECORD).is_file()]
    engine = engine_of(spec.engine)
    if recorded and not engine.capabilities.token_prompts:
        warn(
            f"{', '.join(recorded)}: what is served was not compared with what was trained, since {engine.title} "
            "takes no prompts of token ids"
        )
        return {}
    agreements: dict[str, Agreement] = {}
    for name in recorded:
        records = read_record(spec.folders[name].parent)
        documents = [record for record in records if record.num_targets and len(record.tokens) < context_tokens]
        asked = _Asked.of(spec, documents, address, warn)
        if documents := list(asked.documents):
            agreement = _compare(client, spec, name, asked, base_name or spec.own_name)
            prompts = read_tool_prompts(spec.folders[name].parent)
            with_tools, with_pictures = (
                _differing_prompts(
                    client, spec, name, [one for one in prompts if bool(one.pictures) is seen], context_tokens, warn
                )
                for seen in (False, True)
            )
            agreements[name] = replace(
                agreement, differing_tool_prompts=with_tools, differing_picture_prompts=with_pictures
            )
    return agreements


@dataclass(frozen=True)
class _Asked:
    """Recorded documents that a server is asked for, and how: those with pictures at the engine's own address."""

    engine: Engine
    address: EngineAddress | None
    documents: Sequence[RecordedDocument]
    seen: Mapping[int, SeenDocument]
    """Documents with pictures, by their places among all."""

    @classmethod
    def of(
        cls,
        spec: LaunchSpec,
        documents: Sequence[RecordedDocument],
        address: EngineAddress | None,
        warn: Callable[[str], None],
    ) -> _Asked:
        """Return the documents that can be asked for; `warn` gets the reason if some cannot."""
        engine, of_text = engine_of(spec.engine), [one for one in documents if not one.pictures]
        with_pictures = [one for one in documents if one.pictures]
        if not with_pictures or address is None:
            return cls(engine, address, of_text, {})
        kept = [(one, _seen(one, spec)) for one in with_pictures if spec.takes(one.pictures)]
        found = [(one, seen) for one, seen in kept if seen]
        if len(found) < len(with_pictures):
            warn(
                f"{len(with_pictures) - len(found)} of {counted(len(with_pictures), 'recorded document')} with "
                f"media cannot be compared: more than {spec.max_images} of a kind (`serving.max_images`), kinds that "
                "the model is not served with, or tokens that no text has"
                + "".join(f"; {reason}" for reason in spec.limits.reasons.values())
            )
        seen = {len(of_text) + place: seen for place, (_, seen) in enumerate(found)}
        return cls(engine, address, [*of_text, *(one for one, _ in found)], seen)

    def predictions(self, client: Client) -> list[Predicted]:
        """Ask the server for its predictions of the tokens that training learned in each document."""
        of_text = [one.tokens for place, one in enumerate(self.documents) if place not in self.seen]
        rows = self.engine.predictions(client, of_text) if of_text else []
        if self.address and self.seen:
            rows = [*rows, *self.engine.seeing_predictions(self.address, client, list(self.seen.values()))]
        return [_of_targets(row, one) for row, one in zip(rows, self.documents, strict=True)]


def _seen(document: RecordedDocument, spec: LaunchSpec) -> SeenDocument | None:
    processor = _processor_of(spec.model, spec.serving.trust_remote_code)
    try:
        sizes = [*map(size_of_address, document.pictures)]
    except MediaError as error:
        raise ModelError(f"a medium that training recorded {error}; train the stage again with --force") from error
    prompt = processor.collapsed(document.tokens, sizes)
    return SeenDocument(document.tokens, prompt, document.pictures) if prompt else None


@lru_cache(1)
def _processor_of(model: Path, trust_remote_code: bool) -> MediaProcessor:
    return MediaProcessor(model, trust_remote_code=trust_remote_code)


def agreement_metrics(agreements: Mapping[str, Agreement], served_name: str) -> dict[str, float]:
    """Return all models' differences as metrics; those of others than `served_name` end in `_NAME`."""
    metrics: dict[str, float] = {}
    for name, agreement in sorted(agreements.items(), key=lambda item: item[0] != served_name):
        suffix = "" if name == served_name else f"_{name}"
        metrics |= {f"{metric}{suffix}": value for metric, value in agreement.metrics().items()}
    return metrics


def _compare(client: Client, spec: LaunchSpec, name: str, asked: _Asked, base_name: str) -> Agreement:
    documents = asked.documents
    served = asked.predictions(replace(client, model=name))
    from_training = differences(served, documents)
    if name not in spec.adapters:
        return Agreement(len(documents), from_training)
    base = asked.predictions(replace(client, model=base_name))
    # ln p of each document's targets together: with the adapter, and without.
    totals = [[math.fsum(predicted.log_probabilities) for predicted in side] for side in (served, base)]
    distances = [abs(with_adapter - without) for with_adapter, without in zip(*totals, strict=True)]
    from_base = sum(distances) / sum(document.num_targets for document in documents)
    # An adapter that the server does not apply answers as its base does: nearer to the base than to its training.
    if from_base <= from_training.mean:
        raise ServerError(
            f"the adapter {name} does nothing where it is served: over {counted(len(documents), 'recorded document')} "
            f"its log-probabilities are {from_base:.3g} nats per token from those of its base {spec.own_name}, and "
            f"{from_training.mean:.3g} from those that training recorded; see the server's log for layers that it left "
            "out, or serve what a stage of `kind: merge` makes of it"
        )
    return Agreement(len(documents), from_training)


def _differing_prompts(
    client: Client,
    spec: LaunchSpec,
    name: str,
    prompts: Sequence[ToolPrompt],
    context_tokens: int,
    warn: Callable[[str], None],
) -> int | None:
    """Count recorded prompts that the server tokenizes differently; None if none could be compared."""
    engine, kind = engine_of(spec.engine), "pictures" if any(prompt.pictures for prompt in prompts) else "tools"
    compared = [prompt for prompt in prompts if len(prompt.token_ids) < context_tokens and spec.takes(prompt.pictures)]
    if not compared or not engine.capabilities.prompt_token_ids:
        if prompts:
            cause = (
                f"they do not fit into its {context_tokens} tokens, or have more pictures than it takes"
                if not compared
                else "it does not return their tokens"
            )
            warn(f"{name}: {engine.title} was not asked how it renders prompts with {kind}, since {cause}")
        return None
    problems = [
        problem for prompt in compared if (problem := _rendered_otherwise(replace(client, model=name), spec, prompt))
    ]
    for problem in problems:
        warn(f"{name}: {engine.title} {problem}")
    return len(problems)


def _rendered_otherwise(client: Client, spec: LaunchSpec, prompt: ToolPrompt) -> str | None:
    """Return a warning if the server turns a recorded prompt into other token ids than training did, else None."""
    kind = "pictures" if prompt.pictures else "tools"
    try:
        served = client.prompt_tokens(
            messages_of(prompt),
            **({"tools": prompt.tools, "tool_choice": "none"} if prompt.tools else {}),
            chat_template_kwargs=prompt.variables,
        )
    except ServerError as error:
        return f"refuses a prompt with {kind} that it was trained with: {error}"
    if served == prompt.token_ids:
        return None
    return (
        f"renders a prompt with {kind} to other tokens than it was trained with: "
        f"{_first_difference(spec.model, prompt.token_ids, served)}. So it gets prompts unlike "
        "those of its training; compare the served chat template, and its arguments, with the training's"
    )


def _first_difference(model_folder: Path, learned: list[int], served: list[int]) -> str:
    """Return a text that shows where the served prompt's tokens begin to differ from those that training saw."""
    from stages.data.tokenizer import DocumentTokenizer  # and Transformers, in over a second

    tokenizer = DocumentTokenizer(model_folder, None, "assistant")
    pairs = enumerate(zip(learned, served, strict=False))
    first = next((place for place, (one, other) in pairs if one != other), min(len(learned), len(served)))
    texts = [
        quoted(tokenizer.decode(tokens[first : first + SHOWN_TOKENS]), SHOWN_CHARACTERS) for tokens in (learned, served)
    ]
    return f"from token {first + 1} on it learned {texts[0]}, and is asked {texts[1]}"


def _of_targets(row: Predicted, document: RecordedDocument) -> Predicted:
    """Select, of all token predictions of a document, those of the tokens that count in the training loss."""
    # `row.log_probabilities[i]` is of token i + 1, as `targets[i]` is: the first token has no prediction.
    places = [place for place, target in enumerate(document.targets) if target >= 0]
    greedy = [row.greedy[place] for place in places] if row.greedy else ()
    return Predicted([row.log_probabilities[place] for place in places], greedy)
