"""Records that training leaves beside a model: predictions for later stages to reproduce, and whether it learned chat.

`log_probabilities.json` holds documents with token ids and targets (below 0: none), their log-probabilities in nats,
the likeliest token at each target, and their pictures; and for each dataset with tools a prompt, which servers have to
render to the same tokens. `trained_on.json` in the model's folder is copied with it, and says whether it learned
conversations or plain texts, from which media, and on which date.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import Field

from stages.core.errors import ModelError
from stages.core.fields import StrictModel
from stages.core.files import write_atomically
from stages.models.media import MediaKind

RECORD = "log_probabilities.json"
TOOL_PROMPTS, PICTURE_PROMPTS = "differing_tool_prompts", "differing_picture_prompts"
"""Metrics that count the recorded prompts which a server renders to other tokens."""
RESOLUTION_NATS = 1e-6
"""Smallest distance of a log-probability from 0, in nats, that is no rounding; nearer ones count as this far."""


@dataclass(frozen=True)
class Predicted:
    """Predictions for a document's target tokens: log-probabilities in nats, and likeliest tokens ([] without ids)."""

    log_probabilities: Sequence[float]
    greedy: Sequence[int]


@dataclass(frozen=True)
class RecordedDocument:
    """Document with the model's predictions at the end of training, which later stages must reproduce.

    `targets[i]` is the token after `input_ids[i]`, or below 0 where nothing was learned. log_probability: of all
    targets together, in nats; log_probabilities and greedy (likeliest tokens): of each, [] in old records. pictures: in
    order, each as a `data:` address by `as_address`; the tokens that stand for them are in `input_ids`.
    """

    input_ids: list[int]
    targets: list[int]
    log_probability: float
    log_probabilities: list[float] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)

    @property
    def num_targets(self) -> int:
        return sum(target >= 0 for target in self.targets)

    @property
    def has_tokens(self) -> bool:
        """Return whether predictions of single tokens were recorded, not only the whole document's log-probability."""
        return len(self.greedy) == len(self.log_probabilities) == self.num_targets

    @property
    def tokens(self) -> list[int]:
        """All tokens of the document as a list of token ids, the last target included."""
        # Inputs end one token before the document does: the last target is its last token.
        return [*self.input_ids, *(target for target in self.targets[-1:] if target >= 0)]

    def recording(self, predicted: Predicted) -> RecordedDocument:
        total = math.fsum(predicted.log_probabilities)
        return replace(
            self,
            log_probability=total,
            log_probabilities=list(predicted.log_probabilities),
            greedy=list(predicted.greedy),
        )


class ToolPrompt(StrictModel):
    """Prompt with tools or pictures and its tokens in training; servers must render the prompt to the same tokens.

    messages: end with a question or a tool's answer. tools, variables: as the template got them. token_ids: up to the
    answer. pictures: `data:` addresses for the messages' parts of type `image`, in order.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    token_ids: list[int]
    pictures: list[str] = Field(default_factory=list)


def read_record(artifact: Path) -> list[RecordedDocument]:
    """Return the documents and predictions recorded beside a model; raise ModelError without a readable record."""
    try:
        documents = json.loads((artifact / RECORD).read_text(encoding="utf-8"))["documents"]
        return [RecordedDocument(**one) for one in documents]
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"reading {artifact / RECORD}: {error}; train the stage again with --force") from error


def read_tool_prompts(artifact: Path) -> list[ToolPrompt]:
    """Return the prompts with tools recorded beside a model, if any; raise ModelError for a damaged record."""
    try:
        prompts = json.loads((artifact / RECORD).read_text(encoding="utf-8")).get("tool_prompts", [])
        return [ToolPrompt.model_validate(one) for one in prompts]
    except (OSError, ValueError) as error:
        raise ModelError(f"reading {artifact / RECORD}: {error}; train the stage again with --force") from error


def write_record(
    artifact: Path,
    documents: Sequence[RecordedDocument],
    compute_dtype: str,
    tool_prompts: Sequence[ToolPrompt] = (),
) -> None:
    """Write documents with predictions, and prompts with tools, beside a model. compute_dtype: such as float32."""
    content = {
        "compute_dtype": compute_dtype,
        "documents": [asdict(one) for one in documents],
        "tool_prompts": [one.model_dump(mode="json") for one in tool_prompts],
    }
    write_atomically(artifact / RECORD, json.dumps(content) + "\n")


@dataclass(frozen=True)
class Differences:
    """Differences between a model's predictions and those that training recorded.

    most: of log-probabilities of the document that differs most, in nats per target. mean: over all tokens, in nats per
    target. kl: KL divergence in nats per token; None for records without single tokens. same_greedy: share of the
    targets with the same likeliest token; None also where a server returns no token ids. Two probabilities of each
    distribution are compared, the target's and all others' together, so `kl` is a lower bound of KL(recorded ‖ now).
    """

    most: float
    mean: float
    kl: float | None = None
    same_greedy: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return the differences from recorded predictions by MLflow metric name, the same for every stage."""
        of_tokens = {"kl_from_training_nats_per_token": self.kl, "same_greedy_fraction": self.same_greedy}
        return {
            "max_abs_logprob_difference": self.most,
            "mean_abs_logprob_difference": self.mean,
            **{name: value for name, value in of_tokens.items() if value is not None},
        }


def differences(predicted: Sequence[Predicted], documents: Sequence[RecordedDocument]) -> Differences:
    """Return the differences between predictions, made by any engine, and those recorded in the documents."""
    pairs = list(zip(predicted, documents, strict=True))
    found = [abs(math.fsum(now.log_probabilities) - one.log_probability) for now, one in pairs]
    counts = [one.num_targets for one in documents]
    most = max(value / max(1, count) for value, count in zip(found, counts, strict=True))
    mean = sum(found) / max(1, sum(counts))
    if not all(one.has_tokens for one in documents):
        return Differences(most, mean)
    kl = _mean(
        _kl_nats(recorded, given)
        for now, one in pairs
        for recorded, given in zip(one.log_probabilities, now.log_probabilities, strict=True)
    )
    if not all(now.greedy for now in predicted):
        return Differences(most, mean, kl)
    greedy = (pair for now, one in pairs for pair in zip(one.greedy, now.greedy, strict=True))
    return Differences(most, mean, kl, _mean(float(recorded == given) for recorded, given in greedy))


def _kl_nats(recorded: float, given: float) -> float:
    """Return the KL divergence, in nats, over a token and all others together. recorded, given: ln p of the token."""
    p, q = min(recorded, -RESOLUTION_NATS), min(given, -RESOLUTION_NATS)
    # -expm1(p) = 1 - exp(p), the probability of all other tokens, without cancellation near 0.
    return math.exp(p) * (p - q) - math.expm1(p) * math.log(math.expm1(p) / math.expm1(q))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / max(1, len(found))


TRAINED_ON_FILE, MEDIA = "trained_on.json", "media"


def note_trained_on(
    folder: Path, *, conversations: bool, template_date: date | None = None, media: Collection[MediaKind] = ()
) -> None:
    """Write beside a model's weights, to be copied, whether it learned conversations, and which media.

    template_date: None: default.
    """
    noted = {"conversations": conversations, **({MEDIA: sorted(media)} if media else {})}
    dated = {"template_date": template_date.isoformat()} if template_date else {}
    write_atomically(folder / TRAINED_ON_FILE, json.dumps({**noted, **dated}))


def has_chat_template(folder: Path) -> bool:
    """Return whether a model folder has a chat template, so that its tokenizer can render conversations."""
    tokenizer_config = folder / "tokenizer_config.json"
    in_config = tokenizer_config.is_file() and json.loads(tokenizer_config.read_text()).get("chat_template")
    return bool(in_config) or (folder / "chat_template.jinja").is_file()


def trained_on_conversations(folder: Path) -> bool | None:
    """Return whether the model was trained on conversations; None for one that was trained elsewhere."""
    noted = folder / TRAINED_ON_FILE
    return bool(json.loads(noted.read_text())["conversations"]) if noted.is_file() else None


def trained_on_media(folder: Path) -> frozenset[MediaKind]:
    """Return the kinds of media that the model, or adapter, in a folder learned from."""
    noted = folder / TRAINED_ON_FILE
    return frozenset(json.loads(noted.read_text()).get(MEDIA, ()) if noted.is_file() else ())


def is_asked_as_chat(folder: Path) -> bool:
    """Return whether to send plain text to the model as a chat message: as trained, else if it has a template."""
    trained = trained_on_conversations(folder)
    return has_chat_template(folder) if trained is None else trained


def noted_date(folder: Path) -> date | None:
    """Return the date that the template wrote in training, for serving; None: the template's default."""
    noted = folder / TRAINED_ON_FILE
    found = json.loads(noted.read_text()).get("template_date") if noted.is_file() else None
    return date.fromisoformat(found) if found else None
