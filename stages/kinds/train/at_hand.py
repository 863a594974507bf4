"""Quick checks of a training stage at planning time, against models and datasets that are already on this machine.

They read configs, file headers and first rows. What is only on a hub is checked after its download.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from stages.adapters.named_layers import missing_layers
from stages.core.contract import ModelAtHand
from stages.core.errors import DataError, LayoutError, LifecycleError, ModelError
from stages.data.any_rows import PromptReader
from stages.data.bad_rows import check_first_rows
from stages.data.config import DataConfig
from stages.data.files import find_files
from stages.data.media.folder import MediaFolder
from stages.data.templates import read_template
from stages.kinds.train.checks import media_problems
from stages.kinds.train.fields import TrainFields
from stages.models.facts import CONFIG_FILE, ModelFacts
from stages.models.model_folder import check_config, check_model_folder, check_unquantized, code_not_run
from stages.models.shape import ModelShape
from stages.parallel.engines.registry import RULES


def model_findings(
    config: TrainFields, find_model: Callable[[], ModelAtHand | None], gpu_type: str | None
) -> Iterator[tuple[str, LifecycleError | str]]:
    """Check chat template, model and layout; yield each problem's config field with its error or warning."""
    try:
        _ = config.data.chat_template and read_template(config.data.chat_template)
    except LifecycleError as error:
        yield "data.chat_template", error
    try:
        yield from (("model", note) for note in _notes(config, find_model(), gpu_type))
    except LayoutError as error:
        yield "layout", error
    except LifecycleError as error:
        yield "model", error


def _notes(config: TrainFields, model: ModelAtHand | None, gpu_type: str | None) -> Iterator[str]:
    """Yield warnings about the model that training starts from; raise LayoutError, or ModelError for an unfit one."""
    if model is None:
        return
    facts = ModelFacts(model.config)
    check_config(facts, f"the config of {model.source}")
    check_unquantized(facts, model.source)
    if note := code_not_run(facts, trusted=config.trust_remote_code):
        yield note
    if model.folder:
        yield from check_model_folder(ModelFacts(model.folder))
    rules = RULES[config.engine]
    if shape := _shape_to_fit(config, facts):
        errors = config.refusals(shape)
        if gpu_type:
            errors += rules.device_errors(gpu_type, config.layout, config.precision, shape)
        if errors:
            raise LayoutError("; ".join(one.removeprefix("layout: ") for one in errors))  # whose field is named before
        yield from rules.layout_warnings(config.layout, config.constraints, shape)
    limit = facts.max_positions
    if limit is not None and config.data.sequence_length > limit:
        yield (
            f"data.sequence_length {config.data.sequence_length} is beyond the {limit} positions of {model.source}; "
            "documents of that length are refused or badly learned"
        )


def _shape_to_fit(config: TrainFields, facts: ModelFacts) -> ModelShape | None:
    """Return the model's shape; None where any model fits, so that none has to be walked, or it is not known."""
    rules, layout = RULES[config.engine], config.layout
    is_quantized = config.workload.adapter is not None and config.workload.adapter.is_quantized
    if not (rules.builds_from_shape or layout.tp * layout.cp * layout.ep > 1 or is_quantized):
        return None
    try:
        return rules.shape_of(facts)
    except ModelError:
        if rules.builds_from_shape or layout.tp * layout.cp * layout.ep > 1:
            raise
        return None  # the start looks at the layers of the model itself


def first_problems(
    config: TrainFields, find_model: Callable[[], Path | None], find_dataset: Callable[[str], Path | None]
) -> Iterator[str]:
    """Check the adapter's target layers and the datasets' first rows, if on this machine; yield the problems."""
    if config.adapter and (folder := find_model()):
        try:
            if (folder / CONFIG_FILE).is_file():
                yield from missing_layers(config.adapter, ModelFacts(folder))
        except (LifecycleError, SafetensorError, OSError):  # `model_findings` has it
            pass
    for place, part in config.data.parts.items():
        folder, has_media = find_dataset(part.dataset_stage), False
        for field, split in (("dataset", part.split), ("evaluation_split", part.evaluation_split)):
            if folder and split:
                try:
                    root, files = _files(folder, split)
                    has_media |= check_first_rows(
                        root, files, part, config.learning.rows, _reader(config, part, root, files)
                    )
                except DataError as error:
                    yield f"data.{place}{field}: {error}"
                except LifecycleError:  # the download reports it
                    return
        if has_media:
            yield from media_problems(config, f"{place}dataset")


def _reader(
    config: TrainFields, part: DataConfig, folder: Path, files: list[Path]
) -> Callable[[object], object] | None:
    """Return the function that reads a row's prompt, for a method that samples completions; None for other methods."""
    if not config.rollouts:
        return None
    media = MediaFolder.of(folder, files, by_header=True)
    return PromptReader(config.rollouts.reference, f"{config.method}.reference", part.columns, media).read


def _files(dataset: Path, split: str) -> tuple[Path, list[Path]]:
    """Return the folder and files of a dataset's split; a dataset that is a single file has only a training split."""
    if dataset.is_file():
        return dataset.parent, [dataset] if split == "train" else []
    return dataset, find_files(dataset, split)
