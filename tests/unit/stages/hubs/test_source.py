"""Sources of downloads are parsed when the recipe is read, or refused with the allowed forms, before any request."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from stages.hubs.builtin.hub import BUILTINS
from stages.hubs.hub import Source, repository
from stages.hubs.registry import parse_source
from stages.kinds.download.config import DownloadConfig


@pytest.mark.parametrize(
    ("text", "product", "source"),
    [
        ("builtin/addition", "dataset", Source("builtin", "dataset", "addition", "builtin/addition")),
        ("file:///models/own", "model", Source("file", "model", "/models/own", "file://")),
        ("file://own/model", "model", Source("file", "model", "own/model", "file://")),
        ("hf://Qwen/Qwen3-0.6B", "model", repository("hf", "model", "Qwen/Qwen3-0.6B", None)),
        ("hf://a/b@refs/pr/4", "model", repository("hf", "model", "a/b", "refs/pr/4")),
        ("hf://datasets/a/b@v1.0", "dataset", repository("hf", "dataset", "a/b", "v1.0")),
        ("s3://lake/nights/2026-11-23", "dataset", Source("s3", "dataset", "lake/nights/2026-11-23", "s3://")),
        ("gs://lake", "model", Source("gs", "model", "lake", "gs://")),
        ("az://lake/a b.jsonl", "dataset", Source("az", "dataset", "lake/a b.jsonl", "az://")),
        ("modelscope://a/b@master", "model", repository("modelscope", "model", "a/b", "master")),
    ],
)
def test_every_form_is_understood(text: str, product, source) -> None:
    assert parse_source(text, product) == source
    assert str(source) == text


@pytest.mark.parametrize(
    ("text", "product", "word"),
    [
        ("Qwen/Qwen3-0.6B", "model", "hf://org/name"),
        ("https://huggingface.co/a/b", "model", "hf://org/name"),
        ("hf://Qwen3", "model", "hf://org/name"),
        ("hf://a/b/c", "model", "hf://org/name"),
        ("hf://a/b@", "model", "hf://org/name"),
        ("hf://a/../b", "model", "hf://org/name"),
        ("hf://datasets/a/b", "model", "hf://org/name"),
        ("hf://a/b", "dataset", "hf://datasets/org/name"),
        ("file://", "model", "needs a path"),
        ("s3://", "dataset", "s3://BUCKET/PATH"),
        ("s3://lake/../other", "dataset", "s3://BUCKET/PATH"),
        ("s3://lake//rows", "dataset", "s3://BUCKET/PATH"),
        ("s3://key:secret@lake/rows", "dataset", "s3://BUCKET/PATH"),
        ("builtin/qwen", "model", "qwen3-1m"),
        ("builtin/addition", "model", "qwen3-1m"),
        ("", "model", "hf://org/name"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(text: str, product, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_source(text, product)
    with pytest.raises(ValidationError, match=word):
        DownloadConfig.model_validate({"kind": "download", product: text})


def test_one_source_exactly() -> None:
    for sources in ({}, {"model": "builtin/qwen3-1m", "dataset": "builtin/addition"}):
        with pytest.raises(ValidationError, match="either"):
            DownloadConfig.model_validate({"kind": "download", **sources})


def test_a_builtin_is_pinned_to_the_version_of_its_maker() -> None:
    version = BUILTINS["qwen3-1m"].version
    assert DownloadConfig(kind="download", model="builtin/qwen3-1m").resolve_outside() == {"revision": str(version)}


def test_planning_a_builtin_imports_nothing_heavy() -> None:
    program = (
        "import sys; from stages.kinds.download.config import DownloadConfig;"
        "DownloadConfig(kind='download', model='builtin/qwen3-1m').resolve_outside();"
        "print({'torch', 'transformers', 'httpx', 'huggingface_hub', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
