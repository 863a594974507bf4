"""Predictions and completions of documents with pictures by vLLM's route for prompts of token ids and media.

`/v1/completions` takes no pictures. This route, `/inference/v1/generate`, which vLLM has with `--enable-scale-out`, is
reached by none but us: the proxy does not pass it on.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import aiohttp
from pydantic import Field

from stages.core.errors import ServerError, TransientError
from stages.data.media.addresses import kind_of_address
from stages.models.media import counted
from stages.models.recorded import Predicted
from stages.remote.http import Answer, AnswerModel, Expected
from stages.serving.backend import EngineAddress, post_to_engine
from stages.serving.client import ChatLogProbs, Choice, Choices, Client, Count, TokenLogProbs, Usage
from stages.serving.engine import SeenDocument

ROUTE = "inference/v1/generate"
CLOSED = (403, 404)
"""HTTP status of the route of a vLLM that was started without it: as it answers, and as servers before it do."""
BASE_BYTES, TOKEN_BYTES = 2**20, 1024
"""Upper bound of an answer's bytes: whatever the prompt, and for each of its tokens."""


TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


def check_takes_pictures(address: EngineAddress, client: Client) -> None:
    """Raise ServerError unless a running vLLM has the route; TransientError for no answer."""
    expected = Expected(f"the server at {client.url}", BASE_BYTES, client.timeout_s, key=client.api_key)
    try:
        (answer,) = post_to_engine(address, expected, ROUTE, [{}])  # which asks for nothing
    except (OSError, aiohttp.ClientError) as error:
        raise TransientError(f"the server at {client.url} does not answer: {type(error).__name__}") from error
    if answer.status in CLOSED:
        raise ServerError(
            f"the server at {client.url} answers {answer.status} to prompts with pictures; start it with "
            "`--enable-scale-out`, where none but trusted programs reach it"
        )


class Likely(AnswerModel):
    """Log-probability of a token at one place of a prompt, and its rank, 1 for the likeliest."""

    logprob: float
    rank: int


class Answered(AnswerModel):
    """Log-probabilities by token id at each place of a prompt; None at the first, which nothing precedes."""

    prompt_logprobs: Annotated[list[dict[TokenName, Likely] | None], Field(min_length=1)]


def predictions(address: EngineAddress, client: Client, documents: Sequence[SeenDocument]) -> list[Predicted]:
    """Return vLLM's ln p of each token but the first of documents with pictures, and the likeliest tokens.

    Raises ServerError if vLLM refuses one, or puts other tokens in place of its pictures.
    """
    longest = max((len(one.tokens) for one in documents), default=0)
    expected = Expected(ROUTE, BASE_BYTES + longest * TOKEN_BYTES, client.timeout_s, key=client.api_key)
    sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    bodies = ({**_asked(client.model, one), "sampling_params": sampling} for one in documents)
    answers = post_to_engine(address, expected, ROUTE, bodies)
    return [_predicted(answer.parsed(Answered), one) for answer, one in zip(answers, documents, strict=True)]


def _predicted(answer: Answered, document: SeenDocument) -> Predicted:
    places = answer.prompt_logprobs
    names = [str(token) for token in document.tokens[1:]]
    found = [place or {} for place in places[1:]]
    if len(found) != len(names) or any(name not in place for name, place in zip(names, found, strict=True)):
        raise _read_otherwise(len(places), document)
    log_probabilities = [place[name].logprob for name, place in zip(names, found, strict=True)]
    return Predicted(log_probabilities, [int(min(place, key=lambda one: place[one].rank)) for place in found])


SAMPLING = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "seed",
    "logprobs",
)
"""Fields of a request to `/v1/completions` that say how to sample; those that are None are left to the server."""


class SeenChoice(AnswerModel):
    """One completion of a prompt with pictures."""

    index: Count = 0
    text: str
    finish_reason: str | None = None
    token_ids: list[Count]
    logprobs: ChatLogProbs | None = None


class Completed(AnswerModel):
    """Completions of a prompt with pictures; prompt_token_ids: of the prompt, as the model read it."""

    choices: Annotated[list[SeenChoice], Field(min_length=1)]
    prompt_token_ids: list[Count]
    usage: Usage | None = None


def completing(request: Mapping[str, Any], document: SeenDocument) -> dict[str, Any]:
    """Return the body that completes a prompt with pictures as `request` to `/v1/completions` says."""
    sampling = {name: request[name] for name in SAMPLING if request.get(name) is not None}
    shown = {"output_mode": "text", "return_token_ids": True}
    return {**_asked(request["model"], document), **shown, "sampling_params": sampling}


def completed(answer: Answer, document: SeenDocument) -> Choices[Choice]:
    """Return vLLM's answer as one of `/v1/completions`. Raises ServerError if it read other tokens than training."""
    found = answer.parsed(Completed)
    if found.prompt_token_ids != document.tokens:
        raise _read_otherwise(len(found.prompt_token_ids), document)
    return Choices[Choice](choices=[*map(_choice, found.choices)], usage=found.usage)


def _choice(seen: SeenChoice) -> Choice:
    content = seen.logprobs and seen.logprobs.content
    logprobs = TokenLogProbs(token_logprobs=[token.logprob for token in content]) if content else None
    return Choice(
        index=seen.index,
        text=seen.text,
        finish_reason=seen.finish_reason,
        logprobs=logprobs,
        token_ids=seen.token_ids,
    )


def _asked(model: str, document: SeenDocument) -> dict[str, Any]:
    parts = [{"type": f"{kind_of_address(address)}_url", "url": address} for address in document.pictures]
    return {"model": model, "token_ids": document.prompt, "content_parts": parts}


def _read_otherwise(num_tokens: int, document: SeenDocument) -> ServerError:
    media = counted([*map(kind_of_address, document.pictures)])
    return ServerError(
        f"vLLM reads a document of {media} as {num_tokens} tokens, and training read it as {len(document.tokens)}, or "
        "as others of as many; serve the model with the processor's files of its training"
    )
