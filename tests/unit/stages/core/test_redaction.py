"""Secrets are taken out of messages and of the files that a stage leaves."""

import pytest

from stages.core.errors import DownloadError
from stages.core.redaction import REPLACEMENT, redact, redact_files, secrets_in

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
    assert (tmp_path / "log.txt").stat().st_ino == inode, "whoever follows the log goes on reading"
    assert (tmp_path / "events.jsonl").stat().st_mtime_ns == untouched
    assert (tmp_path / "weights.safetensors").read_bytes() == b"hf_abcdefgh"
