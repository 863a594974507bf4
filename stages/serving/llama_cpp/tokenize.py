"""Token ids by a running llama.cpp server, asked at the socket where it listens: the proxy passes no such route on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from stages.core.errors import ServerError, TransientError
from stages.serving.backend import EngineAddress

TIMEOUT_S = 600.0


def tokenize(address: EngineAddress, api_key: str, texts: Sequence[str], *, add_special: bool) -> list[list[int]]:
    """Of each text, in which special tokens may be written. add_special: with what the tokenizer puts around it.

    Raises ServerError when it refuses, TransientError when it does not answer.
    """
    return asyncio.run(_tokenized(address, api_key, texts, add_special))


async def _tokenized(address: EngineAddress, api_key: str, texts: Sequence[str], add_special: bool) -> list[list[int]]:
    timeout, headers = aiohttp.ClientTimeout(total=TIMEOUT_S), {"Authorization": f"Bearer {api_key}"}
    found: list[list[int]] = []
    try:
        async with aiohttp.ClientSession(connector=address.connector(), timeout=timeout, headers=headers) as session:
            for text in texts:
                body = {"content": text, "add_special": add_special, "parse_special": True}
                async with session.post(address.url / "tokenize", json=body) as answer:
                    if answer.status != 200:
                        raise ServerError(f"asking llama.cpp for token ids: it answered {answer.status}")
                    found.append((await answer.json())["tokens"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise TransientError(f"asking llama.cpp for token ids: {type(error).__name__}: {error}") from error
    return found
