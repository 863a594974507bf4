"""Predictions of documents with pictures by vLLM's route for prompts of token ids and media, `/inference/v1/generate`.

`/v1/completions` takes no pictures. The proxy passes this route on to no one; vLLM has it with `--enable-scale-out`.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from stages.core.errors import ServerError
from stages.core.lines import counted
from stages.models.recorded import Predicted
from stages.remote.http import AnswerModel, Expected
from stages.serving.backend import EngineAddress, post_to_engine
from stages.serving.client import Client
from stages.serving.engine import SeenDocument

ROUTE = "inference/v1/generate"
BASE_BYTES, TOKEN_BYTES = 2**20, 1024
"""Upper bound of an answer's bytes: whatever the prompt, and for each of its tokens."""


TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


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
    bodies = (
        {
            "model": client.model,
            "token_ids": one.prompt,
            "content_parts": [{"type": "image_url", "url": address} for address in one.pictures],
            "sampling_params": sampling,
        }
        for one in documents
    )
    answers = post_to_engine(address, expected, ROUTE, bodies)
    return [_predicted(answer.parsed(Answered), one) for answer, one in zip(answers, documents, strict=True)]


def _predicted(answer: Answered, document: SeenDocument) -> Predicted:
    places = answer.prompt_logprobs
    names = [str(token) for token in document.tokens[1:]]
    found = [place or {} for place in places[1:]]
    if len(found) != len(names) or any(name not in place for name, place in zip(names, found, strict=True)):
        raise ServerError(
            f"vLLM reads a document of {counted(len(document.pictures), 'picture')} as {len(places)} tokens, and "
            f"training read it as {len(document.tokens)}, or as others of as many; serve the model with the "
            "processor's files of its training"
        )
    log_probabilities = [place[name].logprob for name, place in zip(names, found, strict=True)]
    return Predicted(log_probabilities, [int(min(place, key=lambda one: place[one].rank)) for place in found])
