"""People's own keys: taken at once, revoked within a second, bounded by the day over all proxies, and audited."""

import json
import re
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime

import httpx
import pytest

from flows.cli.main import main
from stages.core.errors import StoreError
from stages.serving import people as peoples
from stages.serving import proxy
from stages.serving.backend import Backend
from stages.serving.people import People, tokens_of
from stages.serving.person_keys import add_key, keys_folder, read_keys, revoke_key
from stages.serving.proxy import Proxy, listening
from stages.serving.server import listening_socket
from stages.serving.tally import ServedVersion
from tests.openai_engine import PROMPT_TOKENS, OpenAIEngine
from tests.serving import wait_for

OWN = "the-server's-key"
CHAT = "/v1/chat/completions"
PATIENCE_S = 10.0
"""Seconds that a loaded machine may take for what proxies look at several times a second."""
QUESTION = {"model": "adder", "messages": [{"role": "user", "content": "a private question"}]}


@pytest.fixture(autouse=True)
def _no_midnight(monkeypatch):
    """Let the day last as long as a test, since quotas renew at midnight."""
    day = peoples.today()
    monkeypatch.setattr(peoples, "today", lambda: day)


@contextmanager
def proxies(folder, number=1, engine=None, version=None):
    """Provide HTTP clients of proxies that share a folder of keys, without a key of their own."""
    engine = engine or OpenAIEngine("adder")
    with ExitStack() as stack:
        address = stack.enter_context(engine.listening())
        clients = []
        for _ in range(number):
            public = stack.enter_context(listening_socket("127.0.0.1", None))
            people = stack.enter_context(People(folder))
            stack.enter_context(listening(Proxy(Backend(address, version=version), OWN, people=people), public))
            url = f"http://127.0.0.1:{public.getsockname()[1]}"
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=60)))
        yield clients


def ask(client, key, **more):
    return client.post(CHAT, json={**QUESTION, **more}, headers={"Authorization": f"Bearer {key}"})


def is_refused(client, key):
    """Return whether a key is refused; the request that is under way when a key ceases to hold is cut off first."""
    with suppress(httpx.TransportError):
        return ask(client, key).status_code == 401
    return False


def audited(folder):
    return [json.loads(line) for file in sorted(folder.glob("audit-*")) for line in file.read_text().splitlines()]


def test_a_key_is_taken_and_revoked_within_a_second_and_only_its_hash_is_kept(tmp_path):
    folder = tmp_path / "keys"
    assert peoples.LOOK_INTERVAL_S < 0.5
    with proxies(folder) as (client,):
        assert ask(client, OWN).status_code == 200
        key = add_key(folder, "anna@example.org")
        wait_for(lambda: ask(client, key).status_code == 200, PATIENCE_S)
        secret = key.rpartition(".")[2]
        kept = (folder / "keys.json").read_text()
        assert secret not in kept and (folder / "keys.json").stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        for wrong in (secret, f"anna@example.org.{secret[:-1]}", f"bob.{secret}", f"{key}x", ".", "anna@example.org."):
            assert ask(client, wrong).status_code == 401
        revoke_key(folder, "anna@example.org")
        wait_for(lambda: is_refused(client, key), PATIENCE_S)
        assert ask(client, OWN).status_code == 200
        again = add_key(folder, "anna@example.org")
        wait_for(lambda: ask(client, again).status_code == 200, PATIENCE_S)
        assert ask(client, key).status_code == 401


def test_a_revoked_key_cuts_off_a_stream_under_way_and_a_damaged_file_closes(tmp_path, capfd):
    engine, key, other = OpenAIEngine("adder"), add_key(tmp_path, "anna"), add_key(tmp_path, "bob")
    with proxies(tmp_path, engine=engine) as (client,):
        engine.go_on.clear()
        headers = {"Authorization": f"Bearer {key}"}
        with client.stream("POST", CHAT, json={**QUESTION, "stream": True}, headers=headers) as stream:
            parts = stream.iter_raw()
            assert b"data:" in next(parts)
            revoked = threading.Timer(0.0, revoke_key, (tmp_path, "anna"))
            revoked.start()
            began = time.monotonic()
            with pytest.raises(httpx.RemoteProtocolError):
                list(parts)
            assert time.monotonic() - began < PATIENCE_S
            revoked.join()
        engine.go_on.set()
        assert ask(client, other).status_code == 200
        (tmp_path / "keys.json").write_text("{")
        wait_for(lambda: is_refused(client, other), PATIENCE_S)
        assert ask(client, OWN).status_code == 200
    assert "no person's key is taken" in capfd.readouterr().out
    with pytest.raises(StoreError, match=r"keys\.json"):
        People(tmp_path)


def test_a_request_that_was_let_in_just_before_its_key_was_revoked_is_cut_off_too(tmp_path):
    key, stopped = add_key(tmp_path, "anna"), []
    with People(tmp_path) as people:
        let_in = people.of(f"Bearer {key}".encode())
        revoke_key(tmp_path, "anna")
        wait_for(lambda: people.of(f"Bearer {key}".encode()) is None, PATIENCE_S)
        again = f"Bearer {add_key(tmp_path, 'anna')}".encode()
        wait_for(lambda: people.of(again), PATIENCE_S)
        with people.answering(let_in, lambda: stopped.append("the former key")):
            assert stopped
        with people.answering(people.of(again), lambda: stopped.append("the new key")):
            assert "the new key" not in stopped


def test_a_revoked_key_does_not_cut_off_the_next_request_on_its_connection(tmp_path, monkeypatch):
    engine, key, stops, answering = OpenAIEngine("adder"), add_key(tmp_path, "anna"), [], People.answering
    monkeypatch.setattr(
        People, "answering", lambda people, key, stop: stops.append(stop) or answering(people, key, stop)
    )
    with proxies(tmp_path, engine=engine) as (client,):
        assert ask(client, key).status_code == 200
        engine.go_on.clear()
        headers = {"Authorization": f"Bearer {OWN}"}
        with client.stream("POST", CHAT, json={**QUESTION, "stream": True}, headers=headers) as stream:
            parts = stream.iter_raw()
            assert b"data:" in next(parts)
            (stop,) = stops
            stop()  # as the thread does that was about to end the first request when this was answered
            assert client.get("/health", headers=headers).status_code == 200
            engine.go_on.set()
            assert b"".join(parts).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("version", [None, ServedVersion("adder", "1")], ids=["no version", "a version"])
def test_a_quota_holds_for_the_sum_over_proxies_and_says_when_it_renews(tmp_path, version):
    key, free = add_key(tmp_path, "anna", 4 * (PROMPT_TOKENS + 2)), add_key(tmp_path, "bob")
    with proxies(tmp_path, 2, version=version) as (one, two):
        assert [ask(client, key).status_code for client in (one, two, one, two)] == [200] * 4
        wait_for(lambda: tokens_of(tmp_path)["anna"] == 4 * (PROMPT_TOKENS + 2), PATIENCE_S)
        wait_for(lambda: [ask(client, key).status_code for client in (one, two)] == [429, 429], PATIENCE_S)
        refused = ask(one, key)
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        now = datetime.now(UTC)
        used = re.search(r"has used (\d+) of its 28 tokens a day; it renews at .*T00:00:00Z$", error["message"])
        # Each proxy reads the other's counts every quarter of a second: until then it answers beyond the quota.
        assert int(used[1]) >= 28
        wait_for(lambda: tokens_of(tmp_path)["anna"] >= int(used[1]), PATIENCE_S)
        assert 0 < int(refused.headers["Retry-After"]) <= 86_400 - (now.hour * 3600 + now.minute * 60 - 120)
        assert ask(two, free).status_code == 200 and ask(two, OWN).status_code == 200
    with proxies(tmp_path) as (again,):  # counts outlive their process
        assert ask(again, key).status_code == 429


def test_streams_are_counted_by_the_engine_and_those_that_a_client_leaves_by_their_events(tmp_path):
    engine, key = OpenAIEngine("adder"), add_key(tmp_path, "anna")
    with proxies(tmp_path, engine=engine) as (client,):
        text = ask(client, key, stream=True).text
        assert '"usage"' not in text  # the client has not asked for it
        wait_for(lambda: tokens_of(tmp_path)["anna"] == PROMPT_TOKENS + len(engine.deltas), PATIENCE_S)
        engine.go_on.clear()
        headers = {"Authorization": f"Bearer {key}", "Accept-Encoding": "gzip"}
        with client.stream("POST", CHAT, json={**QUESTION, "stream": True}, headers=headers) as stream:
            size = len(stream.request.content)
            next(stream.iter_raw())
        # Before the engine goes on: it would end the answer with its counts.
        wait_for(lambda: tokens_of(tmp_path)["anna"] > PROMPT_TOKENS + len(engine.deltas), PATIENCE_S)
        engine.go_on.set()
        left = tokens_of(tmp_path)["anna"] - PROMPT_TOKENS - len(engine.deltas)
        assert -(-size // 4) <= left <= -(-size // 4) + len(engine.deltas)


def test_the_audit_log_names_who_asked_what_model_and_no_text(tmp_path):
    key = add_key(tmp_path, "anna", 1)
    with proxies(tmp_path) as (client,):
        assert [ask(client, key).status_code for _ in range(2)] == [200, 429]
        authorized = {"Authorization": f"Bearer {key}"}
        assert client.get("/metrics", headers=authorized).status_code == 403
        assert client.post(CHAT, content=b"[]", headers=authorized).status_code == 429
        assert ask(client, OWN).status_code == 200
    lines = audited(tmp_path)
    expected = {"who": "anna", "model": "adder", "route": CHAT, "status": 200}
    assert {name: lines[0][name] for name in expected} == expected
    assert (lines[0]["prompt_tokens"], lines[0]["completion_tokens"]) == (PROMPT_TOKENS, 2)
    assert datetime.fromisoformat(lines[0]["time"]).tzinfo
    assert [line["status"] for line in lines] == [200, 429, 403, 429]
    text = "".join(file.read_text() for file in tmp_path.glob("*-*"))
    assert "private" not in text and key.rpartition(".")[2] not in text
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("audit-*")} == {0o600}


def test_every_refused_request_leaves_a_line_and_a_flood_of_wrong_keys_few(tmp_path, monkeypatch):
    monkeypatch.setattr(proxy, "MAX_BODY_BYTES", 1000)
    key, revoked = add_key(tmp_path, "anna"), add_key(tmp_path, "bob")
    revoke_key(tmp_path, "bob")
    secret = key.rpartition(".")[2]
    with proxies(tmp_path) as (client,):
        authorized = {"Authorization": f"Bearer {key}"}
        assert client.get("/metrics", headers=authorized).status_code == 403
        assert client.get(f"/v1/{secret}", headers=authorized).status_code == 404
        assert client.get(CHAT, headers=authorized).status_code == 405
        assert client.post(CHAT, content=b"[]", headers=authorized).status_code == 400
        assert client.post(CHAT, content=bytes(2000), headers=authorized).status_code == 413
        wrong = [revoked, f"anna.{secret}x", f"private.{secret}", secret]
        assert {ask(client, one).status_code for one in wrong for _ in range(50)} == {401}
        assert ask(client, OWN).status_code == 200
    lines = audited(tmp_path)
    assert all(line["prompt_tokens"] == line["completion_tokens"] == 0 for line in lines)
    of_anna = [(line["route"], line["status"]) for line in lines if line["who"] == "anna" and line["status"] != 401]
    assert of_anna == [("/metrics", 403), (None, 404), (CHAT, 405), (CHAT, 400), (CHAT, 413)]
    refused = [line for line in lines if line["status"] == 401]
    numbers = {who: sum(line["requests"] for line in refused if line["who"] == who) for who in ("anna", "bob", None)}
    assert numbers == {"anna": 50, "bob": 50, None: 100}
    assert len(refused) < 100
    text = "".join(file.read_text() for file in tmp_path.glob("audit-*"))
    assert secret not in text and revoked.rpartition(".")[2] not in text and "private" not in text


def test_quotas_renew_at_midnight(tmp_path, monkeypatch):
    key = add_key(tmp_path, "anna", 1)
    monkeypatch.setattr(peoples, "today", lambda: "2026-01-01")
    with proxies(tmp_path) as (client,):
        assert [ask(client, key).status_code for _ in range(2)] == [200, 429]
        monkeypatch.setattr(peoples, "today", lambda: "2026-01-02")
        wait_for(lambda: ask(client, key).status_code == 200, PATIENCE_S)
        assert ask(client, key).status_code == 429


def test_the_commands_show_a_key_once_and_refuse_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))

    def called(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["keys", *arguments])
        return ended.value.code, "".join(capsys.readouterr())

    code, key = called("add", "anna", "--tokens-a-day", "1000")
    assert code in (0, None) and key.startswith("anna.")
    assert called("add", "anna")[0] == StoreError.exit_code
    assert "letters" in called("add", "an na")[1]
    assert "no one" not in called("list")[1] and key.strip() not in called("list")[1]
    assert "used 0 of 1,000 tokens today" in called("list")[1]
    assert "anna" in called("revoke", "bob")[1]
    assert called("revoke", "anna")[0] in (0, None)
    assert "revoked" in called("list")[1]
    assert read_keys(keys_folder(tmp_path))["anna"].revoked
