"""Fixtures with a tokenizer whose tokens are single bytes, so that loss masks can be read as text."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from stages.data.tokenizer import DocumentTokenizer, TokenizedDocument

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|end_header|>", "<|eot|>"]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Provide a function that writes a tokenizer folder with a chat template, and returns its path."""

    def make(
        template: str | None = CHATML, *, begins_texts: bool = False, merges: Iterable[tuple[str, str]] = ()
    ) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        merged = [first + second for first, second in merges]
        tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + merged
        tokenizer = Tokenizer(
            models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[*merges])
        )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(SPECIAL_TOKENS)
        if begins_texts:
            begin = tokenizer.token_to_id("<s>")
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
        ).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tokenizer_folder(make_tokenizer: Callable[..., Path]) -> Path:
    """Provide the folder of a tokenizer with the ChatML template."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def read_ids(tokenizer_folder: Path) -> Callable[[Iterable[int]], str]:
    """Provide a function that decodes token ids into text, special tokens included."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


@pytest.fixture(scope="session")
def learned(read_ids: Callable[[Iterable[int]], str]) -> Callable[[TokenizedDocument], list[str]]:
    """Provide a function that returns the text of each contiguous run of tokens that have a loss."""

    def runs(tokens: TokenizedDocument) -> list[str]:
        found: list[list[int]] = []
        for position, (token, has_loss) in enumerate(zip(tokens.ids, tokens.loss, strict=True)):
            if has_loss and (position == 0 or not tokens.loss[position - 1]):
                found.append([])
            if has_loss:
                found[-1].append(int(token))
        return [read_ids(run) for run in found]

    return runs


@pytest.fixture
def tokenize_with(make_tokenizer: Callable[..., Path]) -> Callable[..., TokenizedDocument]:
    """Provide a function that tokenizes a document with a given chat template and other tokenizer options."""

    def tokenize(
        document: object, template: str | None = CHATML, train_on: str = "assistant", **options: object
    ) -> TokenizedDocument:
        tokenizer = DocumentTokenizer(make_tokenizer(template, **options), None, train_on)
        return tokenizer.encode([tokenizer.render(document)])[0]

    return tokenize


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Provide a function that writes rows as JSON Lines, and returns the dataset folder."""

    def write(rows: Iterable[object], name: str = "train.jsonl") -> Path:
        folder = tmp_path / "dataset"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write
