"""Proof that two processes that split a family's tiny model learn what plain Transformers does: one pair for many.

As a program, `splitting SPEC.json`, forked twice by `tests.parity.ranks`, it trains the spec's cases one after another.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.core.errors import LifecycleError
from stages.data.batch import Batch
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.optimizer import full_tensor
from stages.engines.fsdp.packed import packed
from stages.engines.settings import AdamSettings, EngineSettings, MediaSettings
from stages.kinds.train.checks import media_errors
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.models.loading import class_with_head, load_config
from stages.models.walked import shape_of
from stages.parallel.engines.registry import RULES
from stages.parallel.layout import Layout
from stages.parallel.processes import joined_processes
from tests.parity.ranks import started_ranks
from tests.zoo.models import load, tiny_config
from tests.zoo.pictures import Documents, load_seeing, log_probabilities
from tests.zoo.planning import keep_shape
from tests.zoo.table import YES, sentence

LAYOUTS = {"tp": {"tp": 2}, "cp": {"cp": 2}, "ep": {"dp_shard": 2, "ep": 2}}
"""Layouts of two processes, by column."""
NUM_STEPS, LEARNING_RATE = 2, 1e-2
EPSILON = 1e-3
"""Adam's epsilon: with a smaller one, weights with nearly no gradient follow its rounding."""
LARGEST_OF_LOSS, LARGEST_OF_WEIGHTS = 2e-6, 5e-6
"""Largest difference of losses, relative, and of weights after the steps, which amplify rounding."""
LARGEST_OF_PICTURES = 1e-5
"""Largest difference of losses on documents with pictures, whose log-probabilities are large."""
PATIENCE = timedelta(seconds=120)
"""Time after which a process no longer waits for another, which has failed alone."""
NOISE = re.compile("drop|jitter_noise")
LENGTHS = ((9, 5, 10), (12, 12))
"""Lengths of the documents that each of two data-parallel processes has."""


def split(folders: Mapping[str, Path], columns: Sequence[str], root: Path) -> dict[str, dict[str, str]]:
    """Return what families' tiny models, by name with a tokenizer in their folders, gave in each column."""
    found: dict[str, dict[str, str]] = {family: {} for family in folders}
    cases = []
    for family, folder in folders.items():
        without_noise(folder)
        for column in columns:
            if why := _refusal(family, folder, Layout(**LAYOUTS[column])):
                found[family][column] = sentence(why)
            else:
                cases.append((family, column))
    with started_ranks(TQDM_DISABLE="1") as ranks:
        while cases:
            given, outcomes = root / "spec.json", root / "outcomes"
            outcomes.write_text("")
            spec = [[family, column, str(folders[family])] for family, column in cases]
            given.write_text(json.dumps({"cases": spec, "outcomes": str(outcomes)}))
            try:
                ranks.run(__name__, 2, given, log=root / "log.txt")
            except RuntimeError as error:  # of a case that had no outcome yet
                with outcomes.open("a") as file:
                    print(json.dumps(str(error).strip().splitlines()[-1]), file=file)
            done = [json.loads(line) for line in outcomes.read_text().splitlines()]
            for (family, column), outcome in zip(cases, done, strict=False):
                found[family][column] = sentence(outcome.replace(f"{folders[family]}", "the model"))
            cases = cases[len(done) :]
    return found


def fields_to_split(family: str) -> dict[str, Any]:
    """Return other values for a family's tiny config: two heads of keys, where all families could have them."""
    config = tiny_config(family).get_text_config()
    return {"num_key_value_heads": 2} if getattr(config, "num_key_value_heads", None) == 1 else {}


def without_noise(folder: Path) -> None:
    """Take dropout and a router's jitter out of a folder's config: processes would draw other values."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, *(one for one in config.values() if isinstance(one, dict))):
        part.update({name: 0.0 for name, value in part.items() if isinstance(value, float) and NOISE.search(name)})
    path.write_text(json.dumps(config))


def _refusal(family: str, folder: Path, layout: Layout) -> str:
    """Return why a plan refuses to train a family with this layout; empty if it does not."""
    keep_shape(folder)
    errors = [*RULES["fsdp"].model_errors(layout, shape_of(ModelFacts(folder)))]
    if class_with_head(load_config(folder), "tokens") is None:
        config = {"kind": "train", "method": "sft", "model": "base", "data": {"dataset": "data", "sequence_length": 64}}
        fields = {"global_batch_size": 2, "learning_rate": LEARNING_RATE, "layout": layout, "precision": "fp32"}
        errors += media_errors(TrainConfig.model_validate({**config, **fields}))
    return errors[0] if errors else ""


def main() -> None:
    """Train the cases of a spec, and write a line with the outcome of each."""
    torch.set_num_threads(1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    plain: dict[str, _Learned] = {}
    with joined_processes(PATIENCE) as device:
        for _, column, folder in spec["cases"]:
            outcome = _outcome(Path(folder), Layout(**LAYOUTS[column]), device, plain)
            if torch.distributed.get_rank() == 0:
                with Path(spec["outcomes"]).open("a") as file:
                    print(json.dumps(outcome), file=file)


@dataclass(frozen=True)
class _Learned:
    """Losses of plain Transformers' steps in fp64, the weights after them, and how far off its fp32 is, at most."""

    losses: list[float]
    weights: dict[str, Tensor]
    rounding: float


def _outcome(folder: Path, layout: Layout, device: torch.device, plain: dict[str, _Learned]) -> str:
    try:
        rows = _Rows(folder)
        if f"{folder}" not in plain:
            plain.clear()  # of the model before
            plain[f"{folder}"] = rows.learned()
        expected = plain[f"{folder}"]
        settings = EngineSettings(
            layout,
            "fp32",
            AdamSettings(LEARNING_RATE, epsilon=EPSILON),
            media=MediaSettings() if rows.pictures else None,
        )
        engine = FsdpEngine(ModelFacts(folder), settings, device)
        micro_batches = rows.share(engine.data_rank, engine.data_parallel_size)
        found = [engine.train_step(micro_batches, SftLoss(), LEARNING_RATE, None).loss for _ in range(NUM_STEPS)]
        own = {name: full_tensor(one.detach()) for name, one in engine._model.causal_lm.named_parameters()}
        engine.close()
    except LifecycleError as error:  # any other may be of one process alone, and ends both
        return str(error)
    if found[-1] > found[0] - 1e-3:
        return "nothing was learned"
    by_loss = max(abs(one / other - 1) for one, other in zip(found, expected.losses, strict=True))
    by_weight = max((own[name] - one).abs().max().item() for name, one in expected.weights.items())
    if by_loss > (LARGEST_OF_PICTURES if rows.pictures else LARGEST_OF_LOSS):
        return f"losses differ by {by_loss:.1g}"
    return YES if by_weight <= max(LARGEST_OF_WEIGHTS, 2 * expected.rounding) else f"weights differ by {by_weight:.1g}"


class _Rows:
    """Two rows of documents for a model: of text, or with pictures for one that has no class of text alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pictures = class_with_head(load_config(folder), "tokens") is None
        if self.pictures:
            self.documents = Documents(folder)
            self.rows = [self.documents.batch((0,)), self.documents.batch((1, 2))]
        else:
            torch.manual_seed(0)
            self.rows = [packed(torch.randint(1, 49, (sum(one),)).split(one)) for one in LENGTHS]

    def share(self, rank: int, size: int) -> list[Batch]:
        return self.rows[rank::size]

    def learned(self) -> _Learned:
        """Train plain Transformers on the documents, one by one."""
        # Features of pictures are in fp32, which no fp64 tower takes.
        losses, weights = self._learned(torch.float32 if self.pictures else torch.float64)
        _, rounded = self._learned(torch.float32)
        return _Learned(losses, weights, max((rounded[name] - one).abs().max().item() for name, one in weights.items()))

    def _learned(self, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
        model = (load_seeing(self.folder) if self.pictures else load(self.folder)).to(dtype)
        model.set_experts_implementation("eager")  # grouped products take no fp64
        rates = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": EPSILON, "weight_decay": 0}
        optimizer = torch.optim.AdamW(model.parameters(), **rates)
        count, losses = sum(int(one.signal.has_target.sum()) for one in self.rows), []
        for _ in range(NUM_STEPS):
            loss = -sum(one.double().sum() for one in self._log_probabilities(model)) / count
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses, {name: one.detach() for name, one in model.named_parameters()}

    def _log_probabilities(self, model: Any) -> list[Tensor]:
        if self.pictures:
            return [log_probabilities(model, self.documents, self.documents.batch())]
        found = []
        for lengths, row in zip(LENGTHS, self.rows, strict=True):
            documents = row.inputs.input_ids.split(lengths, 1)
            logits = torch.cat([model(input_ids=one, use_cache=False).logits for one in documents], 1)
            targets = row.signal.targets.clamp(min=0)[..., None]
            found.append(logits.log_softmax(-1).gather(2, targets).squeeze(2) * row.signal.has_target)
        return found
