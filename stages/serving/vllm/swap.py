"""Adapters of a running vLLM, loaded and unloaded at the socket where it listens: never by way of the proxy.

Each version has a name and a folder of its own. Under a name that was used before, vLLM would answer from the prefix
cache of the former weights, or read the files again at every request.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from stages.core.errors import ServerError, TransientError
from stages.serving.proxy import EngineAddress

TIMEOUT_S = 120.0


def load_adapter(address: EngineAddress, api_key: str, name: str, folder: Path) -> None:
    """Raises ServerError when vLLM refuses it, which harms nothing; TransientError when it does not answer."""
    asyncio.run(_post(address, api_key, "load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}))


def unload_adapter(address: EngineAddress, api_key: str, name: str) -> None:
    """Forget the name; its weights make room when another needs it. Raises as `load_adapter` does."""
    asyncio.run(_post(address, api_key, "unload_lora_adapter", {"lora_name": name}))


async def _post(address: EngineAddress, api_key: str, route: str, body: dict[str, str]) -> None:
    timeout, headers = aiohttp.ClientTimeout(total=TIMEOUT_S), {"Authorization": f"Bearer {api_key}"}
    try:
        async with (
            aiohttp.ClientSession(connector=address.connector(), timeout=timeout, headers=headers) as session,
            session.post(address.url / "v1" / route, json=body) as answer,
        ):
            said = await answer.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise TransientError(f"asking vLLM to {route} {body['lora_name']}: {type(error).__name__}: {error}") from error
    if answer.status != 200:
        raise ServerError(f"asking vLLM to {route} {body['lora_name']}: it answered {answer.status}: {said[:500]}")
