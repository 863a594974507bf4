"""Token ids by a running llama.cpp server, asked at the socket where it listens: the proxy passes no such route on."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp

from stages.core.errors import TransientError
from stages.core.redaction import shortened
from stages.remote.http_answers import AnswerModel, Expected
from stages.serving.backend import EngineAddress, post_to_engine
from stages.serving.completions import Count

TIMEOUT_S = 600.0
TOKEN_BYTES = 16


class _Tokenized(AnswerModel):
    tokens: list[Count]


def tokenize(address: EngineAddress, api_key: str, texts: Sequence[str], *, add_special: bool) -> list[list[int]]:
    """Return the token ids of each text, which may hold special tokens. add_special: with those around a text.

    Raises ServerError when it refuses, TransientError when it does not answer.
    """
    longest = max((len(text.encode()) for text in texts), default=0)
    expected = Expected("asking llama.cpp for token ids: it", 2**16 + longest * TOKEN_BYTES, TIMEOUT_S, key=api_key)
    bodies = [{"content": text, "add_special": add_special, "parse_special": True} for text in texts]
    try:
        return [answer.parsed(_Tokenized).tokens for answer in post_to_engine(address, expected, "tokenize", bodies)]
    except (OSError, aiohttp.ClientError) as error:
        cause = shortened(str(error), 200)
        raise TransientError(f"asking llama.cpp for token ids: {type(error).__name__}: {cause}") from error
