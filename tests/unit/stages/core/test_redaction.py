"""Secrets are removed from messages and from the files that a stage leaves."""

import json
import time

import pytest

from stages.core.errors import DownloadError
from stages.core.redaction import REPLACEMENT, quoted, redact, redact_files, secrets_in, shortened

SECRETS = {"HF_TOKEN": "hf_abcdefgh", "VLLM_API_KEY": "sk-12345678", "DB_PASSWORD": "open sesame"}


def test_secrets_are_told_by_the_names_of_variables_and_by_urls_with_passwords():
    environment = {**SECRETS, "HF_ENDPOINT": "https://me:pass%40word@hub.example", "HOME": "/home/me", "A_TOKEN": "no"}
    assert secrets_in(environment) == {*SECRETS.values(), "pass%40word"}


@pytest.mark.parametrize("secret", SECRETS.values())
def test_an_error_that_quotes_a_secret_does_not_tell_it(monkeypatch, secret):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    error = DownloadError(f"the server refused {secret}, and {secret} again")
    assert str(error) == f"the server refused {REPLACEMENT}, and {REPLACEMENT} again"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("asking http://me:secret@hub:80/x for it", "asking http://me:***@hub:80/x for it"),
        ("postgresql+psycopg://u:p@h/d", "postgresql+psycopg://u:***@h/d"),
        ("http://hub:80/a@b", "http://hub:80/a@b"),
        ("at 12:30 write to me@example.org", "at 12:30 write to me@example.org"),
        ("http://me:p@ss@w:rd@hub/x and redis://:p@ss@hub", "http://me:***@hub/x and redis://:***@hub"),
        (
            '{"a": "http://me:secret@hub", "b": "http://hub:80", "c": "me@home"}',
            '{"a": "http://me:***@hub", "b": "http://hub:80", "c": "me@home"}',
        ),
    ],
)
def test_the_password_of_a_url_is_never_told_even_when_no_variable_holds_it(text, redacted):
    assert redact(text, ()) == redacted


def test_files_are_rewritten_in_place_and_only_those_that_hold_a_secret(tmp_path):
    (tmp_path / "log.txt").write_text("a\nhf_abcdefgh\nb\n")
    (tmp_path / "events.jsonl").write_text("{}\n")
    (tmp_path / "weights.safetensors").write_bytes(b"hf_abcdefgh")
    untouched = (tmp_path / "events.jsonl").stat().st_mtime_ns
    inode = (tmp_path / "log.txt").stat().st_ino
    redact_files(tmp_path, SECRETS.values())
    assert (tmp_path / "log.txt").read_text() == "a\n***\nb\n"
    assert (tmp_path / "log.txt").stat().st_ino == inode, "a reader that follows the log goes on reading"
    assert (tmp_path / "events.jsonl").stat().st_mtime_ns == untouched
    assert (tmp_path / "weights.safetensors").read_bytes() == b"hf_abcdefgh"


@pytest.mark.parametrize(
    ("secret", "text", "redacted"),
    [
        ("hunter2", "DB_PASSWORD=hunter2 is no good: 'hunter2'", "DB_PASSWORD=*** is no good: '***'"),
        ("main", "main of the remainder: main_", "*** of the remainder: ***_"),
        ('pa"ss\\wörd', json.dumps({"at": 'pa"ss\\wörd'}), '{"at": "***"}'),
        ('pa"ss\\wörd', json.dumps({"at": 'pa"ss\\wörd'}, ensure_ascii=False), '{"at": "***"}'),
        ('pa"ss\\wörd', json.dumps(json.dumps({"at": 'pa"ss\\wörd'})), json.dumps(json.dumps({"at": "***"}))),
        ("a\nb'\"long", repr({"at": "a\nb'\"long"}), "{'at': '***'}"),
        ("p@ss/word", "http://me:p%40ss%2Fword@hub and p%40ss%2Fword alone", "http://me:***@hub and *** alone"),
        ("p%40ss%2Fword", "refused p@ss/word", "refused ***"),
    ],
)
def test_a_secret_is_found_however_short_it_is_and_however_it_is_written(secret, text, redacted):
    assert redact(text, secrets_in({"DB_PASSWORD": secret})) == redacted


def test_switches_that_are_named_like_secrets_hold_none():
    assert not secrets_in({"HF_HUB_DISABLE_IMPLICIT_TOKEN": "True", "A_KEY": "1", "B_KEY": "none", "C_KEY": "  "})


@pytest.mark.parametrize(
    "key",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "sk-proj-abcdefghijklmnopqrstuvwx",
        "sk-0123456789abcdefghijklmnopqr",
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-123456789012-abcdefghij",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    ],
)
def test_keys_of_known_services_are_found_whether_or_not_they_are_in_the_environment(key):
    assert redact(f"file:///home/{key} is no folder; found `{key}`", ()) == "file:///home/*** is no folder; found `***`"
    assert redact(f"{key}-and-more_of_it/{key}", ()).endswith("/***")


def test_an_address_that_is_a_key_is_hidden_and_so_is_the_password_of_one_that_became_a_path():
    assert (
        redact('"https://hooks.slack.com/services/T0/B0/CC-C" fails', ())
        == '"https://hooks.slack.com/services/***" fails'
    )
    assert redact("there is no file /rows/https:/me:p%40ss@hub/x", ()) == "there is no file /rows/https:/me:***@hub/x"


@pytest.mark.parametrize(
    "text",
    [
        "sk-learn-like-pipelines-and-models",
        "the task hf_something",
        "models:/adder@champion",
        "expected https://hooks.slack.com/services/…",
    ],
)
def test_names_that_look_a_little_like_keys_stay(text):
    assert redact(text, ()) == text


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "sk-",
        "hf_",
        "eyJ",
        "eyJaaaaaaaaaaa.",
        "xoxb-",
        ":/",
        "://a:",
        "://",
        "@",
        "x@",
        "://u:p@",
        "hunter2",
        " hunter2",
        'p"w\\',
        "http://u:aaaa",
        ":",
    ],
)
def test_ten_megabytes_are_redacted_in_seconds(piece):
    text = piece * (10_000_000 // len(piece))
    started = time.process_time()
    redact(text, {"hunter2", 'p"w\\ord-of-mine'})
    assert time.process_time() - started < 5


def test_json_that_holds_a_short_secret_stays_json(tmp_path):
    rows = [
        {"event": "warning", "step": 4321, "message": "4321 refused for event"},
        {"message": "hunter2", "n": [4321]},
    ]
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"message": "torn at hunter2')
    redact_files(tmp_path, secrets_in({"A_KEY": "4321", "B_KEY": "event", "C_PASSWORD": "hunter2"}))
    *whole, torn = file.read_text().splitlines()
    assert [json.loads(line) for line in whole] == [
        {"event": "warning", "step": 4321, "message": "*** refused for ***"},
        {"message": "***", "n": [4321]},
    ]
    assert torn == '{"message": "torn at ***'


@pytest.mark.parametrize("limit", [10, 40, 60, 200])
def test_a_text_is_redacted_before_it_is_cut(limit, monkeypatch):
    secret = "Vq8" + "s3cr3t" * 8
    monkeypatch.setenv("JUDGE_API_KEY", secret)
    assert secret[:6] not in shortened(f"answer {secret} was wrong", limit)
    assert secret[:6] not in quoted({"answer": secret}, limit)
    assert len(shortened(f"answer {secret} " * 50, limit)) <= limit


def test_a_password_whose_end_lies_behind_the_cut_is_not_shown():
    assert "hunter" not in shortened(f"postgresql://me:{'hunter2' * 20}@host/db", 60)
    assert "hunter" not in shortened(f"postgresql://me:{'hunter2' * 20_000}@host/db", 60)


def test_a_secret_across_the_end_of_the_window_is_not_shown(monkeypatch):
    secret = "Vq8" + "s3cr3t" * 8
    monkeypatch.setenv("JUDGE_API_KEY", secret)
    beginning = f"{secret} " * ((65_536 - 20) // (len(secret) + 1))
    text = beginning + "-" * (65_536 - 20 - len(beginning)) + secret
    assert "s3cr3t" not in shortened(text + "tail" * 100, 60_000)


def test_quoted_escapes_what_a_terminal_would_obey():
    assert quoted("a\x1b[2Jb\u202ec", 40) == r"'a\x1b[2Jb\u202ec'"
    assert quoted(b"\xff[1, 2]", 40) == "'\ufffd[1, 2]'"
    assert quoted([1, "2"], 40) == "'[1, \"2\"]'"
