"""A malicious tokenizer's normalizer cannot exhaust memory, and ordinary ones are accepted."""

import inspect
import json
import unicodedata

import pytest
from tokenizers import Regex, normalizers
from transformers import AutoTokenizer

from stages.core.errors import DataError, ModelError
from stages.data.config import DataConfig
from stages.data.messages import PlainText, RowError
from stages.data.prepare import prepare
from stages.data.tokenizer import DocumentTokenizer
from stages.models.facts import ModelFacts
from stages.models.loading import check_tokenizer
from stages.models.tokenizer_check import FACTORS, LengthGrowth
from tests.unit.stages.data.reports import Reports

GROWS_NOTHING = {"Strip", "StripAccents", "Nmt"}
FROM_THEIR_CONTENT = {"Replace", "Prepend", "Precompiled"}
DOUBLES = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
LONG = "what comes next is  ﷺ and Ǆ, " * 40_000


@pytest.fixture
def with_part(make_tokenizer):
    """Provide a function that writes a tokenizer with another normalizer, pre-tokenizer or decoder."""

    def write(part, *steps):
        folder = make_tokenizer()
        content = json.loads((folder / "tokenizer.json").read_text())
        name = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[part]
        content[part] = {"type": "Sequence", name: list(steps)}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return folder

    return write


@pytest.mark.parametrize(
    "steps",
    [
        [DOUBLES] * 40,
        [{**DOUBLES, "pattern": {"Regex": "q"}}] * 40,
        [{"type": "Sequence", "normalizers": [DOUBLES, {"type": "NFC"}]}] * 40,
        [{**DOUBLES, "content": "q" * 200_000}],
        [{**DOUBLES, "pattern": {"Regex": "(?=q)"}, "content": "q" * 99}] * 9,
        [{**DOUBLES, "content": "é"}, *[{"type": "ByteLevel"}] * 40],
    ],
    ids=["doubles", "by a pattern", "nested", "at once", "before letters", "bytes"],
)
@pytest.mark.parametrize("format", ["chat", "text"])
def test_the_row_that_a_normalizer_makes_huge_is_named(with_part, write_rows, tmp_path, steps, format):
    def row(word):
        chat = {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "yes"}]}
        return chat if format == "chat" else {"text": word}

    folder = write_rows([row("a"), row("b"), row("q"), row("c")])
    config = DataConfig(dataset="data", sequence_length=64)
    report, bad_rows = Reports(), tmp_path / "bad.jsonl"
    with pytest.raises(DataError, match=r"train\.jsonl:3 cannot be tokenized: the model's tokenizer"):
        prepare(
            folder,
            config,
            ModelFacts(with_part("normalizer", *steps)),
            rows="examples",
            cache=tmp_path / "cache",
            report=report,
            bad_rows_file=bad_rows,
        )


def test_what_stands_before_each_part_of_a_text_counts(with_part):
    """The limit on a text's growth counts the normalizer's prefix again after each special token."""
    folder = with_part("normalizer", *[{"type": "Prepend", "prepend": "x" * 999}] * 3)
    tokenizer = DocumentTokenizer(folder, None, "all", special_tokens_in_content="allow")
    assert tokenizer.render(PlainText("", "a<pad>"))
    with pytest.raises(RowError, match="cannot be tokenized"):
        tokenizer.render(PlainText("", "a<pad>" * 9))


def test_a_prompt_is_held_to_the_same_limit(with_part):
    tokenizer = DocumentTokenizer(with_part("normalizer", *[DOUBLES] * 40), None, "assistant")
    assert tokenizer.encode_prompt(PlainText("a", ""))[1]
    with pytest.raises(RowError, match="more than 16 times"):
        tokenizer.encode_prompt(PlainText("q", ""))


@pytest.mark.parametrize(
    ("part", "step"), [("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False}), ("decoder", DOUBLES)]
)
def test_other_chains_are_refused_when_the_tokenizer_is_loaded(with_part, part, step):
    with pytest.raises(ModelError, match=rf"the `{part}` of the tokenizer in .* times as long"):
        DocumentTokenizer(with_part(part, *[step] * 40), None, "all")


def test_a_downloaded_tokenizer_is_refused_before_it_is_tried(with_part):
    doubles = {**DOUBLES, "pattern": {"String": "e"}, "content": "ee"}
    with pytest.raises(ModelError, match="more than 16 times as many bytes"):
        list(check_tokenizer(ModelFacts(with_part("normalizer", *[doubles] * 19))))


def test_a_chain_that_only_a_rare_letter_would_show_is_refused_at_the_download_too(with_part):
    with pytest.raises(ModelError, match=r"the normalizer of the tokenizer in .* 1,099,511,627,776 times as long"):
        rare = {**DOUBLES, "pattern": {"String": "ж"}, "content": "жж"}
        list(check_tokenizer(ModelFacts(with_part("normalizer", *[rare] * 40))))


def test_the_row_whose_pattern_takes_too_many_steps_is_named(with_part, write_rows, tmp_path):
    slow = {**DOUBLES, "pattern": {"Regex": "(q+)+$"}}
    folder = write_rows([{"text": "a"}, {"text": "q" * 40 + "!"}])
    with pytest.raises(DataError, match=r"train\.jsonl:2: the tokenizer in .* fails on a text: .*retry-limit"):
        prepare(
            folder,
            DataConfig(dataset="data", sequence_length=64),
            ModelFacts(with_part("normalizer", slow)),
            rows="examples",
            cache=tmp_path / "cache",
            report=Reports(),
            bad_rows_file=tmp_path / "bad.jsonl",
        )


@pytest.mark.parametrize(
    "chain",
    [
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Prepend("▁")],
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Replace("``", '"')],
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex("\\s+"), "▁"), normalizers.BertNormalizer()],
    ],
)
def test_ordinary_normalizers_are_not_refused(chain):
    state = json.loads(normalizers.Sequence(chain).__getstate__())
    assert LengthGrowth(state).problem(LONG) is None
    assert LengthGrowth(state).problem("ﷺ" * 500) is None


def test_no_step_of_the_library_grows_more_than_its_factor_says():
    kinds = {name for name, kind in inspect.getmembers(normalizers, inspect.isclass) if kind.__module__ != "typing"}
    kinds -= {"Normalizer", "Sequence", "NormalizedString"}
    assert kinds - GROWS_NOTHING - FROM_THEIR_CONTENT <= FACTORS.keys()
    changed = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    changed = [one for one in changed if unicodedata.normalize("NFKD", one) != one or one.lower() != one]
    changed += ["\U0002f800", "\U0001d160", "一", "가", "\U0001f600", "é", "\t", "a"]
    for kind in kinds - FROM_THEIR_CONTENT:
        step = getattr(normalizers, kind)()
        most = max(len(step.normalize_str(one).encode()) / len(one.encode()) for one in changed)
        assert most <= FACTORS.get(kind, 1.0), kind


def test_tokens_are_the_same_in_small_batches_as_in_one(tokenizer_folder, monkeypatch):
    tokenizer = DocumentTokenizer(tokenizer_folder, None, "all")
    texts = [tokenizer.render(PlainText("", f"text {number}")) for number in range(20)]
    whole = [tokens.ids.tolist() for tokens in tokenizer.encode(texts)]
    monkeypatch.setattr("stages.data.tokenizer.BATCH_CHARACTERS", 10)
    assert [tokens.ids.tolist() for tokens in tokenizer.encode(texts)] == whole
    ids = AutoTokenizer.from_pretrained(tokenizer_folder)("text 3", add_special_tokens=False)["input_ids"]
    assert whole[3][: len(ids)] == ids
