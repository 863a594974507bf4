"""What a llama.cpp server predicts of given tokens: it knows no `echo`, so each token is asked for on its own.

After the tokens before it, one token is sampled that a bias makes certain. Its log-probability is reported as it is
without the bias, and so is the likeliest token. What was asked before is in the server's cache: a token costs a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stages.core.errors import ServerError
from stages.models.recorded import Predicted

if TYPE_CHECKING:
    from stages.serving.client import Client  # its HTTP imports would slow every plan

CERTAIN = 1e4
"""Added to a logit: more than they differ by."""
Entry = dict[str, Any]


def predictions(client: Client, rows: list[list[int]]) -> list[Predicted]:
    """Of every token of each row but the first. Raises ServerError when the server does not say."""
    return [_of_row(client, row) for row in rows]


def _of_row(client: Client, row: list[int]) -> Predicted:
    entries = [_sampled(client, row[:place], row[place], 1) for place in range(1, len(row))]
    # The log-probability of a token that ends within a character is not reported: then another is made certain, and the
    # token is found among all of them.
    whole = next((row[place] for place, entry in enumerate(entries, 1) if entry), None)
    values, greedy = [], []
    for place, entry in enumerate(entries, 1):
        if entry:
            values.append(float(entry["logprob"]))
            greedy.append(int(entry["top_logprobs"][0]["id"]))
        else:
            others = _all(client, row[:place], whole)
            values.append(others[row[place]])
            greedy.append(max(others, key=lambda token: others[token]))
    return Predicted(values, greedy)


def _all(client: Client, prompt: list[int], whole: int | None) -> dict[int, float]:
    """Token → its log-probability, of the whole vocabulary."""
    vocabulary = int(client.models()[0]["meta"]["n_vocab"])
    entry = None if whole is None else _sampled(client, prompt, whole, vocabulary)
    if entry is None:
        raise ServerError(
            f"{client.url} tells no log-probability after {len(prompt)} tokens: it reports whole characters"
        )
    return {int(other["id"]): float(other["logprob"]) for other in entry["top_logprobs"]}


def _sampled(client: Client, prompt: list[int], token: int, num_likeliest: int) -> Entry | None:
    """The report of one token; None where the server tells none."""
    choice = client.complete(prompt, max_tokens=1, logprobs=num_likeliest, logit_bias=[[token, CERTAIN]])
    reported = choice["logprobs"]
    entry: Entry | None = reported["content"][0] if reported else None
    if entry and entry["id"] != token:
        raise ServerError(
            f"{client.url} was made to say token {token}, and said {entry['id']}: it ignores `logit_bias`"
        )
    return entry
