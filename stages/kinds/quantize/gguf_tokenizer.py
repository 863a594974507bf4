"""Conversion of a Hugging Face tokenizer (byte-level BPE) to the metadata of a GGUF file.

llama.cpp has only names of the regular expressions that it was compiled with: a tokenizer that splits in another way is
refused; if it seems known, token ids of real rows are compared (`gguf_file.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import ModelError
from stages.core.files import read_json_object
from stages.models.facts import ModelFacts
from stages.models.loading import load_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    WORDS.replace("NUMBERS", r"\p{N}"): "qwen2",
    WORDS.replace("NUMBERS", r"\p{N}{1,3}"): "llama-bpe",
    # Groups of digits, whose digits no merge joins: those of such a tokenizer were apart when it was trained.
    r"\d": "superbpe",
}
"""llama.cpp's name of a pre-tokenizer, by the regular expression in `tokenizer.json`."""
NORMALIZERS = (None, "NFC")
"""Unicode normalizers that a tokenizer may have; llama.cpp normalizes nothing, but most text is in NFC already."""


def splitting_of(folder: Path) -> str:
    """Return llama.cpp's name of a model's pre-tokenizer; raise ModelError if it has none like it."""
    tokenizer = read_json_object(folder / "tokenizer.json")
    model, normalizer = tokenizer.get("model") or {}, tokenizer.get("normalizer") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise _unknown(folder, f"its model is {model.get('type')}, with bytes as a fallback")
    if normalizer.get("type") not in NORMALIZERS:
        raise _unknown(folder, f"its normalizer is {normalizer['type']}")
    parts = _parts(tokenizer.get("pre_tokenizer") or {})
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space"):
        raise _unknown(folder, f"it splits text by {', '.join(str(part.get('type')) for part in parts) or 'nothing'}")
    if len(parts) == 1 and parts[0].get("use_regex", True):
        return "gpt-2"
    patterns = [(part.get("pattern") or {}).get("Regex") for part in parts[:-1]]
    if len(patterns) != 1 or patterns[0] not in SPLITS or parts[-1].get("use_regex", True):
        raise _unknown(folder, f"it splits text by {patterns}")
    return SPLITS[patterns[0]]


def write_tokenizer(writer: GGUFWriter, facts: ModelFacts) -> None:
    """Write a model's tokenizer into a GGUF file; every row of the embedding gets a token name."""
    from gguf import TokenType

    folder = facts.folder

    written = read_json_object(folder / "tokenizer.json")
    added = {token["id"]: token for token in written.get("added_tokens", ())}
    names = {number: name for name, number in written["model"]["vocab"].items()}
    names |= {number: token["content"] for number, token in added.items()}  # these may lie beyond the vocabulary

    def kind(number: int) -> TokenType:
        if number in added:
            return TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
        return TokenType.NORMAL if number in names else TokenType.UNUSED

    # Older files hold "a b" for a merge, newer ones ["a", "b"].
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in written["model"]["merges"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting_of(folder))
    numbers = range(facts.config["vocab_size"])
    writer.add_token_list([names.get(number, f"[unused{number}]") for number in numbers])
    writer.add_token_types([kind(number) for number in numbers])
    writer.add_token_merges(list(merges))
    tokenizer = load_tokenizer(folder)
    begin = tokenizer.bos_token_id
    ends = _ends(facts) or [tokenizer.eos_token_id]
    special = {"bos": begin, "eos": ends[0], "eot": ends[-1], "pad": tokenizer.pad_token_id}
    for name, number in special.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    # What the tokenizer does, whatever its config says.
    writer.add_add_bos_token(begin is not None and tokenizer("a")["input_ids"][0] == begin)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _parts(pre_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    if pre_tokenizer.get("type") == "Sequence":
        return list(pre_tokenizer.get("pretokenizers", ()))
    return [pre_tokenizer] if pre_tokenizer else []


def _ends(facts: ModelFacts) -> list[int]:
    """Return the ids of the tokens that end an answer (end of text, end of turn), from the model's config files."""
    path = facts.folder / "generation_config.json"
    found = read_json_object(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = facts.config.get("eos_token_id")
    return found if isinstance(found, list) else [] if found is None else [found]


def _unknown(folder: Path, found: str) -> ModelError:
    return ModelError(
        f"writing {folder} as GGUF: llama.cpp does not know its tokenizer: {found}; expected byte-level BPE that "
        "splits as those of GPT-2, Llama 3 or Qwen do. Choose another method"
    )
