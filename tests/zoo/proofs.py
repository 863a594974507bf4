"""Proofs of what the project does with each family's tiny model: against Transformers, or the reason why not.

python -m tests.zoo.proofs [--columns COLUMN …] [FAMILY …]   # try these, or all; keep the outcomes in families.json
"""

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor

from stages.adapters.config import AdapterConfig
from stages.core.errors import LifecycleError
from stages.data.batch import Batch
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.packed import packed
from stages.engines.fsdp.probe import probe
from stages.engines.settings import AdamSettings, EngineSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.models.loading import class_with_head, load_config
from stages.models.processor_files import reads_media
from stages.parallel.layout import Layout
from tests.zoo.media import MEDIA_FAMILIES
from tests.zoo.models import FAMILIES, load, tiny_model
from tests.zoo.planning import planner
from tests.zoo.processors import PROCESSORS, save_processor
from tests.zoo.quantizing import METHOD_COLUMNS
from tests.zoo.serving import SERVED, served
from tests.zoo.splitting import LAYOUTS, fields_to_split, split
from tests.zoo.table import RECORD, UNTRIED, YES, recorded, sentence
from tests.zoo.tokenizer import save_tokenizer

LEARNING_RATE = 1e-3
LARGEST_DIFFERENCE = 2e-5
"""Largest difference of log-probabilities in nats, in fp32, of tokens that are 1e-3 apart before and after a step."""
LENGTHS = (12, 7, 9)
AT_A_TIME = 25
"""Number of families that one process of vLLM serves before what came out is kept."""


def documents(folder: Path) -> str:
    """Probe the model; return `packed` or `rows`."""
    verdict = probe(load_config(folder), trust_remote_code=False)
    return verdict.tags["documents"] if verdict.attention else verdict.sentence


def exported(folder: Path) -> str:
    """Train one step and export: Transformers gives the exported model the log-probabilities that the engine gives."""
    return _trained(folder, None, lambda target: load(target))


def adapter(folder: Path) -> str:
    """Train an adapter for one step: PEFT gives base and adapter the log-probabilities that the engine gives."""
    options = AdapterConfig(rank=1)
    return _trained(folder, options, lambda target: PeftModel.from_pretrained(load(folder), target).eval())


def pictures(folder: Path) -> str:
    """Train one step on documents with pictures; return how they are laid out, `packed` or `rows`, or what differs."""
    from tests.zoo.test_pictures import pictures as trained  # imports this module

    save_processor(ModelFacts(folder).config["model_type"], folder)
    return trained(folder)


COLUMNS: dict[str, Callable[[Path], str]] = {
    "documents": documents,
    "exported": exported,
    "adapter": adapter,
    "pictures": pictures,
    "planner": planner,
    **METHOD_COLUMNS,
}


def result(column: str, folder: Path) -> str:
    """Return what a family's model gave in a column: `yes` or its kind, or why not; `UNTRIED` for one without eyes."""
    config = load_config(folder)
    if column == "pictures" and config.model_type not in MEDIA_FAMILIES:
        return UNTRIED
    sees = column == "pictures" or (column in METHOD_COLUMNS and reads_media(folder))
    if column != "planner" and not sees and class_with_head(config, "tokens") is None:
        return "not read as a language model: Transformers' AutoModelForCausalLM does not know it"
    try:
        return COLUMNS[column](folder)
    except LifecycleError as error:
        return sentence(str(error).replace(f"{folder}", "the model"))
    except Exception as error:  # of Transformers or PEFT, at a family never tried before
        return sentence(f"{type(error).__name__}: {error}".replace(f"{folder}", "the model"))


def save_family(family: str, folder: Path, **fields: Any) -> Path:
    """Write a family's tiny model with a tokenizer of its vocabulary; return the folder. fields: as of `tiny_model`."""
    tiny_model(family, **fields).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_to_serve(family: str, folder: Path, **fields: Any) -> Path:
    """Write a family's tiny model, as a server reads it: with its processor of images, if it has one."""
    save_family(family, folder, **fields)
    if family in PROCESSORS:
        save_processor(family, folder)
    return folder


def result_of(column: str, family: str, folder: Path) -> str:
    """Write a family's tiny model, for quantizers with its processor of images, and return what a column gave."""
    try:
        (save_to_serve if column in METHOD_COLUMNS else save_family)(family, folder)
    except Exception as error:  # of Transformers, such as a package that a processor needs
        return sentence(f"{type(error).__name__}: {error}")
    return result(column, folder)


def served_of(families: Iterable[str], root: Path) -> dict[str, str]:
    """Write families' tiny models under `root` and serve them; return what came out, or why one could not be made."""
    folders, unmade = _saved(families, root)
    return served(folders) | unmade


def split_of(families: Iterable[str], root: Path, columns: Sequence[str] = (*LAYOUTS,)) -> dict[str, dict[str, str]]:
    """Write families' tiny models under `root` and split each between two processes; return what came out by column."""
    folders, unmade = _saved(families, root, fields_to_split)
    return split(folders, columns, root) | {family: dict.fromkeys(columns, why) for family, why in unmade.items()}


def _saved(
    families: Iterable[str], root: Path, fields: Callable[[str], dict[str, Any]] = lambda _: {}
) -> tuple[dict[str, Path], dict[str, str]]:
    """Write families' tiny models; return the folders of those that could be made, and why others could not."""
    folders, unmade = dict[str, Path](), dict[str, str]()
    for family in families:
        try:
            folders[family] = save_to_serve(family, root / family, **fields(family))
        except Exception as error:
            unmade[family] = sentence(f"{type(error).__name__}: {error}")
    return folders, unmade


def _trained(folder: Path, options: AdapterConfig | None, loaded: Callable[[Path], Any]) -> str:
    """Train one step, export, and compare with what `loaded` makes of the exported folder."""
    torch.manual_seed(0)
    token_ids = torch.randint(1, 49, (sum(LENGTHS),)).split(LENGTHS)
    batch = packed(token_ids)
    with one_process(), tempfile.TemporaryDirectory() as name:
        settings = EngineSettings(Layout(), "fp32", AdamSettings(LEARNING_RATE), adapter=options)
        engine = FsdpEngine(ModelFacts(folder), settings, torch.device("cpu"))
        before = engine.predictions(batch)[0]
        for _ in range(2):  # an adapter's A has no gradient in the first step, as B is 0
            engine.train_step([batch], SftLoss(), LEARNING_RATE, None)
        after = engine.predictions(batch)[0]
        engine.export(Path(name), torch.float32)
        expected = _log_probabilities(loaded(Path(name)), token_ids, batch)
        engine.close()
    difference = (after - expected).abs().max().item()
    if not (after - before).abs().max() > 1e-4:
        return "nothing was learned"
    return YES if difference <= LARGEST_DIFFERENCE else f"log-probabilities differ by {difference:.1g} nats"


@torch.no_grad()
def _log_probabilities(model: Any, token_ids: tuple[Tensor, ...], batch: Batch) -> Tensor:
    """Return the target tokens' log-probabilities [1, tokens] of documents that Transformers computes one by one."""
    logits = torch.cat([model(input_ids=one[None], use_cache=False).logits for one in token_ids], dim=1)
    targets = batch.signal.targets.clamp(min=0)[..., None]
    return logits.log_softmax(-1).gather(2, targets).squeeze(2) * batch.signal.has_target


@contextmanager
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def keep(family: str, outcomes: dict[str, str]) -> None:
    """Keep outcomes of a family in the record, beside those of other columns."""
    record = recorded()
    record[family] = {**record.get(family, {}), **outcomes}
    ordered = {name: record[name] for name in FAMILIES if name in record}
    RECORD.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    print(family, outcomes, flush=True)


def main() -> None:
    """Try families, and keep what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="families to try (default: all)")
    columns = [*COLUMNS, *LAYOUTS, SERVED]
    parser.add_argument("--columns", nargs="+", choices=columns, default=columns, help="what to try")
    arguments = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    logging.disable(logging.WARNING)
    families = arguments.families or [*FAMILIES]
    of_folders = [column for column in COLUMNS if column in arguments.columns]
    for family in families if of_folders else ():
        with tempfile.TemporaryDirectory() as name:
            outcomes = {column: result_of(column, family, Path(name)) for column in of_folders}
        keep(family, outcomes)
    if of_two := [column for column in LAYOUTS if column in arguments.columns]:
        with tempfile.TemporaryDirectory() as name:
            for family, outcomes in split_of(families, Path(name), of_two).items():
                keep(family, outcomes)
    if SERVED in arguments.columns:
        for at in range(0, len(families), AT_A_TIME):
            with tempfile.TemporaryDirectory() as name:
                for family, outcome in served_of(families[at : at + AT_A_TIME], Path(name)).items():
                    keep(family, {SERVED: outcome})


if __name__ == "__main__":
    main()
