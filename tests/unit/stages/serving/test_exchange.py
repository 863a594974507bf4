"""Tokens and finish reasons of a streamed answer are counted correctly, however its bytes are split into chunks."""

import json

import pytest

from stages.serving.exchange import Exchange


def event(*choices: dict, **more: object) -> str:
    return f"data: {json.dumps({'choices': [*choices], **more})}"


SAID = 'They write "finish_reason": "stop" and {"usage": {"completion_tokens": 99}}.'
PARTS = [
    event({"index": 0, "delta": {"content": SAID}, "finish_reason": None}, usage=None),
    event({"index": 1, "delta": {"content": "b"}, "finish_reason": None}),
    event({"index": 1, "delta": {}, "finish_reason": "stop"}),
    event({"index": 0, "delta": {"content": "c"}, "finish_reason": "length"}).replace(" ", ""),
]
USAGE = event(usage={"prompt_tokens": 7, "completion_tokens": 3})
DONE = "data: [DONE]"


def read(chunks: list[bytes], **options: bool) -> tuple[Exchange, bytes]:
    """Return the proxy's `Exchange` after it has read a response's chunks, and the bytes that the client gets."""
    exchange = Exchange({"stream": True}, **options)
    exchange.begin(200, "text/event-stream", None)
    passed = b"".join(map(exchange.passed, chunks))
    return exchange, passed + exchange.end()


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("keeps_content", [False, True])
def test_tokens_and_reasons_are_counted_wherever_the_bytes_are_split(end, keeps_content):
    whole = end.join([*PARTS, USAGE, DONE, ""]).encode()
    expected = end.join([*PARTS, DONE, ""]).encode()
    for position in range(len(whole) + 1):
        exchange, passed = read([whole[:position], whole[position:]], keeps_content=keeps_content)
        assert passed == expected
        assert (exchange.prompt_tokens, exchange.completion_tokens) == (7, 3)
        assert sorted(exchange.finish_reasons) == ["length", "stop"]
        if keeps_content:
            assert [exchange.choices[index].content for index in (0, 1)] == [f"{SAID}c", "b"]
    assert read([bytes([byte]) for byte in whole])[1] == expected


def test_a_whole_event_passes_with_the_chunk_that_ends_it():
    exchange = Exchange({"stream": True})
    exchange.begin(200, "text/event-stream", None)
    first, second = (f"{part}\n\n".encode() for part in PARTS[:2])
    assert exchange.passed(first) == first
    assert exchange.passed(second[:9]) == b""
    assert exchange.passed(second[9:] + first) == second + first


def test_an_event_that_only_speaks_of_a_reason_counts_none():
    exchange, _ = read([f"{PARTS[0]}\n\n".encode()])
    assert (exchange.finish_reasons, exchange.completion_tokens) == ([], 0)
