"""Loading of a model folder with Transformers: its config, its tokenizer and processor, its model, weights or not.

For every caller: only files of the folder are read, weights from safetensors (or GGUF) and never from pickles, its code
runs only where trusted, and a tokenizer is loaded only if that cannot fill the memory. Importing this module is light:
Transformers comes with the first call.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from stages.core.errors import ModelError
from stages.models.device_kernels import keep_models_of_transformers, use_kernels_on_gpus_alone
from stages.models.facts import PROCESSOR_FILES, ModelFacts
from stages.models.tower import patch_side, sub_configs

Head = Literal["tokens", "score", "pictures"]
"""Kind of inputs and output head.

`tokens` gives log-probabilities of the next token, `pictures` does so after text with media, `score` gives one
number per text.
"""
AUTO_CLASSES: dict[Head, str] = {
    "tokens": "AutoModelForCausalLM",
    "score": "AutoModelForSequenceClassification",
    "pictures": "AutoModelForMultimodalLM",
}

SENTENCE = "The sum of 27 and 15 is 42, she said. "
REPETITIONS = 50
MAX_NORMALIZER_GROWTH = 2.0**20
"""Largest factor by which a normalizer may lengthen a text: published ones reach a thousand, more could fill memory."""
LEAST_SHARE = 0.5
"""Smallest share of expected tokens when a sentence is repeated; fewer show a tokenizer that loses text."""


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return Transformers' config of a model folder. Raises what Transformers raises."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)


def load_tokenizer(
    folder: Path, *texts: str, trust_remote_code: bool = False, max_growth_factor: float = math.inf
) -> Any:
    """Load the tokenizer of a model folder with Transformers.

    Raises ModelError if that fails, or could, as well as encoding `texts`, fill the memory; max_growth_factor: see
    `check_tokenizer_file`.
    """
    from transformers import AutoTokenizer

    from stages.models.tokenizer_check import check_tokenizer_file

    check_tokenizer_file(folder, *texts, max_factor=max_growth_factor)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises nothing more special, and Transformers anything
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}") from error


def load_processor(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the processor of a model folder, which makes a model's inputs of text and pictures, with Transformers.

    Raises ModelError if that fails, as for the tokenizer within it.
    """
    from transformers import AutoProcessor

    from stages.models.start_up import find_torchvision
    from stages.models.tokenizer_check import check_tokenizer_file

    find_torchvision()
    check_tokenizer_file(folder, max_factor=math.inf)
    try:
        return AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # Transformers raises anything
        raise ModelError(f"the processor in {folder} cannot be loaded: {type(error).__name__}: {error}") from error


def load_image_processor(config: Any, folder: Path) -> Any:
    """Return the image processor of a model folder; without one, its family's usual one for towers of this size.

    config: Transformers' config of the model. Raises what Transformers raises.
    """
    from transformers import AutoImageProcessor
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available

    from stages.models.start_up import find_torchvision

    find_torchvision()
    if any((folder / name).is_file() for name in PROCESSOR_FILES):
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    classes = IMAGE_PROCESSOR_MAPPING[type(config)]
    processor = classes["torchvision" if is_torchvision_available() and "torchvision" in classes else "pil"]()
    if hasattr(processor, "patch_size"):
        processor.patch_size = patch_side(config)
    seen = next((one.image_size for one in sub_configs(config) if isinstance(getattr(one, "image_size", None), int)), 0)
    # A size is a dict, or Transformers' own class, which yields pairs.
    if seen and dict(processor.size or {}).keys() == {"height", "width"}:
        processor.size = type(processor.size)(height=seen, width=seen)
    return processor


def load_feature_extractor(config: Any, folder: Path) -> Any:
    """Return what makes spectrograms of sounds for a model folder; without one, its family's usual one for its tower.

    config: Transformers' config of the model. Raises what Transformers raises.
    """
    from transformers import AutoFeatureExtractor
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING

    if any((folder / name).is_file() for name in PROCESSOR_FILES):
        return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
    bins = next((one.num_mel_bins for one in sub_configs(config) if hasattr(one, "num_mel_bins")), None)
    return FEATURE_EXTRACTOR_MAPPING[type(config)](**({"feature_size": bins} if bins else {}))


def load_model(folder: Path, *, head: Head = "tokens", **options: Any) -> Any:
    """Return the model of a folder with its weights; raises what Transformers raises. options: Transformers' own."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    loaded = _auto_class(head).from_pretrained(folder, local_files_only=True, use_safetensors=True, **options)
    # With `output_loading_info` the first of two.
    use_kernels_on_gpus_alone(loaded[0] if isinstance(loaded, tuple) else loaded)
    return loaded


def build_model(config: Any, *, head: Head = "tokens", device: str = "meta", **options: Any) -> Any:
    """Return a model of a config, on the meta device without weights; raises and takes what Transformers does."""
    import torch

    with torch.device(device):
        model = _auto_class(head).from_config(config, **options)
    use_kernels_on_gpus_alone(model)
    return model


def model_without_weights(folder: Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the model of a folder on the meta device, without weights. options: as of `build_model`."""
    config = load_config(folder, trust_remote_code=trust_remote_code)
    return build_model(config, trust_remote_code=trust_remote_code, **options)


def class_with_head(config: Any, head: Head) -> type | None:
    """Return Transformers' model class for this config and output head; None if there is none."""
    found: type | None = _auto_class(head)._model_mapping.get(type(config), None)
    return found


def head_of(config: Any) -> Head:
    """Return `pictures` for the config of a model that sees, which is then loaded with its tower; else `tokens`."""
    return "tokens" if class_with_head(config, "pictures") is None else "pictures"


def _auto_class(head: Head) -> Any:
    import transformers

    keep_models_of_transformers()
    return getattr(transformers, AUTO_CLASSES[head])


def check_tokenizer(facts: ModelFacts) -> Iterator[str]:
    """Check the tokenizer in a model's folder with a sentence, and yield warnings.

    Raises ModelError for one that cannot be loaded, drops or truncates text, or knows none of it.
    """
    folder = facts.folder
    tokenizer = load_tokenizer(folder, SENTENCE * REPETITIONS, max_growth_factor=MAX_NORMALIZER_GROWTH)
    try:
        once = tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
        # `verbose=False`: no warning that the text is longer than the model's maximum.
        often = tokenizer(SENTENCE * REPETITIONS, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # tokenizers raises nothing more special
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    problem = _problem(tokenizer, once, often, facts.vocabulary_size)
    if problem:
        raise ModelError(f"the tokenizer in {folder} {problem}; take that of the model, or fetch it again")
    read = tokenizer.decode(once)
    if _letters(read) != _letters(SENTENCE):
        yield f"the tokenizer loses parts of texts: {SENTENCE!r} reads {read!r} in its tokens"
    if tokenizer.eos_token_id is None:
        yield "the tokenizer has no end-of-text token (`eos_token`): only a chat template can say where an answer ends"


def _problem(tokenizer: Any, once: list[int], often: list[int], size: int | None) -> str | None:
    if not once:
        return f"makes no tokens of {SENTENCE!r}"
    if all(token == tokenizer.unk_token_id for token in once):
        return f"knows nothing of {SENTENCE!r}: all its tokens are {tokenizer.unk_token!r}"
    if len(often) < LEAST_SHARE * REPETITIONS * len(once):
        return f"cuts texts: {REPETITIONS} times {len(once)} tokens are {len(often)}"
    if size is not None and max(once) >= size:
        return f"makes token {max(once)} of {SENTENCE!r}, beyond the model's vocabulary of {size}"
    if size is not None and (tokenizer.eos_token_id or 0) >= size:
        return (
            f"ends texts with token {tokenizer.eos_token_id} ({tokenizer.eos_token!r}), beyond the model's vocabulary "
            f"of {size}"
        )
    return None


def _letters(text: str) -> str:
    """Return a text's letters and digits in one case, to compare texts: some tokenizers know one case only."""
    return "".join(filter(str.isalnum, text)).casefold()
