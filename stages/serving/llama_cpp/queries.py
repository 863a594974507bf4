"""Queries that OpenAI's API lacks, for a llama.cpp server: log-probabilities of given tokens, and tokenization.

The server knows no `echo`, so for each token one is sampled after those before it that a bias makes certain; its
log-probability and the likeliest token are reported without the bias. Prompts are cached: a token costs a step.
"""

from collections.abc import Sequence

import aiohttp

from stages.core.errors import ServerError, TransientError
from stages.core.redaction import shortened
from stages.models.recorded import Predicted
from stages.remote.http import AnswerModel, Expected
from stages.serving.backend import EngineAddress, post_to_engine
from stages.serving.client import Choices, Client, Count, Models

CERTAIN = 1e4
"""Logit bias that makes the sampler choose one given token; larger than any difference between logits."""


TOKENIZE_TIMEOUT_S = 600.0
TOKEN_ID_BYTES = 16


class Meta(AnswerModel):
    """Context (prompt and answer together) and vocabulary sizes, as a llama.cpp server reports them."""

    n_ctx: Count
    n_vocab: Count


class _Listed(AnswerModel):
    meta: Meta


class _Token(AnswerModel):
    id: Count
    logprob: float


class _Entry(_Token):
    """Sampled token in the server's answer, with its log-probability and those of the likeliest tokens."""

    top_logprobs: list[_Token]


class _LogProbs(AnswerModel):
    content: list[_Entry]


class _Choice(AnswerModel):
    logprobs: _LogProbs | None = None


class _Tokenized(AnswerModel):
    tokens: list[Count]


def meta_of(client: Client) -> Meta:
    """Return the context length and vocabulary size of the first model that the server lists."""
    listed = client.answer("/v1/models", Models[_Listed]).data
    if not listed:
        raise ServerError(f"{client.url}/v1/models lists no model")
    return listed[0].meta


def predictions(client: Client, rows: list[list[int]]) -> list[Predicted]:
    """Return the server's ln p and likeliest token at each given token but a first one; ServerError for none."""
    return [_of_row(client, row) for row in rows]


def tokenize(address: EngineAddress, api_key: str, texts: Sequence[str], *, add_special: bool) -> list[list[int]]:
    """Return token ids of texts (special tokens allowed), requested from llama.cpp itself, not through the proxy.

    add_special: whether to add the special tokens around a text. Raises ServerError if the server refuses,
    TransientError if it does not answer.
    """
    longest = max((len(text.encode()) for text in texts), default=0)
    max_bytes = 2**16 + longest * TOKEN_ID_BYTES  # a text has at most a token for each byte
    expected = Expected("asking llama.cpp for token ids: it", max_bytes, TOKENIZE_TIMEOUT_S, key=api_key)
    bodies = [{"content": text, "add_special": add_special, "parse_special": True} for text in texts]
    try:
        return [answer.parsed(_Tokenized).tokens for answer in post_to_engine(address, expected, "tokenize", bodies)]
    except (OSError, aiohttp.ClientError) as error:
        cause = shortened(str(error), 200)
        raise TransientError(f"asking llama.cpp for token ids: {type(error).__name__}: {cause}") from error


def _of_row(client: Client, row: list[int]) -> Predicted:
    entries = [_sampled(client, row[:place], row[place], 1) for place in range(1, len(row))]
    # llama.cpp reports no log-probability of a token that ends within a character. For such a token, one with a whole
    # character is forced, and the wanted log-probability is read from the report of the whole vocabulary.
    whole = next((row[place] for place, entry in enumerate(entries, 1) if entry), None)
    values, greedy = [], []
    for place, entry in enumerate(entries, 1):
        if entry:
            values.append(entry.logprob)
            greedy.append(entry.top_logprobs[0].id)
        else:
            others = _all(client, row[:place], whole)
            if row[place] not in others:
                raise ServerError(f"{client.url} gave no log-probability of token {row[place]}")
            values.append(others[row[place]])
            greedy.append(max(others, key=lambda token: others[token]))
    return Predicted(values, greedy)


def _all(client: Client, prompt: list[int], whole: int | None) -> dict[int, float]:
    """Return the log-probability of every token of the vocabulary after a prompt, by token id."""
    entry = None if whole is None else _sampled(client, prompt, whole, meta_of(client).n_vocab)
    if entry is None:
        raise ServerError(
            f"{client.url} returns no log-probability after {len(prompt)} tokens: it reports whole characters"
        )
    return {other.id: other.logprob for other in entry.top_logprobs}


def _sampled(client: Client, prompt: list[int], token: int, num_likeliest: int) -> _Entry | None:
    """Sample one token that a logit bias forces; return the server's log-probability of it, or None."""
    options = {"max_tokens": 1, "temperature": 0, "logprobs": num_likeliest, "logit_bias": [[token, CERTAIN]]}
    request = {"model": client.model, "prompt": prompt, **options}
    reported = client.answer("/v1/completions", Choices[_Choice], request).choices[0].logprobs
    if reported is None or not reported.content:
        return None
    entry = reported.content[0]
    if entry.id != token:
        raise ServerError(f"{client.url} was made to say token {token}, and said {entry.id}: it ignores `logit_bias`")
    if not entry.top_logprobs:
        raise ServerError(f"{client.url} returned no likeliest token, which was requested")
    return entry
