"""Model card (`README.md`) of a published model, written from the records of how the model was made and scored.

The same records give the same card: no clock, no paths, no names of machines.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from stages.core.contract import Relation
from stages.core.errors import RecipeError
from stages.core.intervals import score_interval
from stages.core.yaml_bounds import check_bounds
from stages.harnesses.scores import samples_by_score
from stages.kinds.publish.records import LineageArtifact, PromotedModel
from stages.models.media import DIFFERENT, MEDIA_TAG
from stages.models.model_folder import holds_gguf

_METADATA = re.compile(r"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}")
_LINK = re.compile(r"https://[\w./%+-]{1,300}|LICENSE[\w.-]{0,32}")
LICENCE_FILES = re.compile(r"(LICENSE|LICENCE|NOTICE|USE_POLICY)(\.txt|\.md)?", re.IGNORECASE)
CARD_FILE = "README.md"
TEMPLATE = "card.md.jinja"
STANDARD_ERROR = "_stderr"
MIB = 2**20
NUM_REVISION_CHARACTERS = 12
SETTINGS = (
    "method",
    "engine",
    "learning_rate",
    "steps",
    "epochs",
    "global_batch_size",
    "sequence_length",
    "precision",
    "rank",
    "alpha",
    "group_size",
    "gguf_type",
    "combination",
)
"""Settings that a model card shows, in this order; all others, such as judges' addresses, are not published."""
MEASURED = ("num_rows", "num_documents", "num_tokens", "num_target_tokens", *DIFFERENT.values(), "evaluation_loss")
COUNTS = {"num_documents": "documents", "num_rows": "rows", "num_tokens": "tokens", "num_media": "media"}
TAGS = ("layout", "device_name", MEDIA_TAG)
LOSSES = (
    "kl_nats_per_token",
    "kl_from_training_nats_per_token",
    "max_abs_logprob_difference",
    "mean_abs_logprob_difference",
)
RELATIONS: dict[str, Relation] = {"train": "finetune", "merge": "merge", "quantize": "quantized"}
"""Relation of a stage's model to its base model (as Hugging Face names it), by the kind of stage."""


@dataclass(frozen=True)
class Licence:
    """Licence of a model or dataset, as its card or the recipe states it.

    name: as hubs know it, such as `apache-2.0`, or `other`; then `own_name` and `link` describe it.
    """

    name: str
    own_name: str | None = None
    link: str | None = None

    def __str__(self) -> str:
        return self.own_name or self.name


@dataclass(frozen=True)
class SourceRow:
    """Row of the model card about a base model or dataset. place: address on a hub; else only that it is local."""

    label: str
    product: str
    place: str
    revision: str
    licence: str | None
    mebibytes: float
    used_by: tuple[str, ...]


@dataclass(frozen=True)
class StepRow:
    """Table row of the model card that describes one stage between the base model and the published model."""

    label: str
    kind: str
    settings: tuple[str, ...]
    measured: tuple[str, ...]


@dataclass(frozen=True)
class LossRow:
    """Table row of the model card: one metric of how much quantization or merging changed a model."""

    label: str
    name: str
    value: float


@dataclass(frozen=True)
class Score:
    """Evaluation score in the model card, named `TASK.METRIC`, with its standard error if known."""

    name: str
    value: float
    standard_error: float | None
    num_samples: int | None

    @property
    def interval(self) -> str:
        """Confidence interval (95%) of the score as text, or `not known`."""
        if self.standard_error is None:
            return "not known"
        low, high = score_interval(self.value, self.standard_error, self.num_samples)
        return f"{low:.4f} to {high:.4f}"


def model_card(promoted: PromotedModel, licence: str | None) -> str:
    """Return the text of the model card. licence: from the recipe; None takes the base model's."""
    stated = stated_licence(promoted, licence)
    sources = [_source(made, promoted) for made in promoted.lineage if made.is_source]
    scores = [score for evaluation in promoted.evaluations for score in _scores(evaluation)]
    return _render(
        metadata=_metadata(promoted, stated, scores),
        name=promoted.name,
        recipe=promoted.promotion.record.recipe,
        model=promoted.model,
        is_adapter=promoted.model.record.product == "adapter",
        promoted_on=promoted.promotion.record.finished.date().isoformat(),
        sources=sources,
        datasets=[source for source in sources if source.product == "dataset"],
        steps=[_step(made) for made in promoted.lineage if not made.is_source],
        git_commit=promoted.model.record.git_commit,
        losses=[loss for made in promoted.lineage for loss in _losses(made)],
        scores=scores,
        verdict=promoted.table.partition("\n")[2].strip(),
        approval=promoted.approval and " ".join(promoted.approval.split()),
        limits=list(_limits(promoted, stated, sources, scores)),
    )


def _render(**values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(  # noqa: S701 (Markdown, of texts that are checked where they come from)
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(TEMPLATE).render(**values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _metadata(promoted: PromotedModel, licence: Licence | None, scores: list[Score]) -> str:
    """Return the YAML metadata at the top of a model card, which the Hugging Face hub reads."""
    is_adapter = promoted.model.record.product == "adapter"
    bases = [name for base in promoted.bases if (name := repository_of(base))]
    made_of = [made for made in promoted.lineage if made.record.product == "dataset"]
    datasets = [name for made in made_of if (name := repository_of(made))]
    methods = [str(made.config["method"]) for made in promoted.lineage if "method" in made.config]
    data = ModelCardData(
        license=licence.name if licence else None,
        license_name=licence.own_name if licence else None,
        license_link=licence.link if licence else None,
        base_model=bases[-1] if bases else None,
        datasets=list(dict.fromkeys(datasets)) or None,
        library_name="peft" if is_adapter else "gguf" if holds_gguf(promoted.model.content) else "transformers",
        pipeline_tag="text-generation",
        tags=["llm-lifecycle", *dict.fromkeys(methods)],
        model_name=promoted.name,
        eval_results=[_evaluation(score) for score in scores] or None,
    )
    if bases and promoted.bases:
        data["base_model_relation"] = "adapter" if is_adapter else _relation(promoted.model)
    return data.to_yaml()


def _relation(made: LineageArtifact) -> Relation | None:
    return RELATIONS.get(made.record.kind)


def _evaluation(score: Score) -> EvalResult:
    task, _, metric = score.name.partition(".")
    return EvalResult(
        task_type="text-generation",
        dataset_type=task,
        dataset_name=task,
        metric_type=metric.rpartition(".")[2],
        metric_name=metric,
        metric_value=score.value,
    )


def repository_of(made: LineageArtifact) -> str | None:
    """Return the repository `owner/name` on the Hugging Face hub that an artifact was downloaded from, else None."""
    match = re.fullmatch(r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)(@.*)?", made.result.tags.get("source", ""))
    return match[1] if match and made.is_source else None


def _source(made: LineageArtifact, promoted: PromotedModel) -> SourceRow:
    """Describe the origin of a base model or dataset for the card, without local paths."""
    source, revision = (made.result.tags.get(name, "") for name in ("source", "revision"))
    licence = licence_of([made])
    files = [entry for name, entry in made.record.files.items() if name.startswith(f"{made.content.name}/")]
    return SourceRow(
        label=made.label,
        product=made.record.product,
        place="files of its maker" if source.startswith("file://") else source or "not recorded",
        revision=f"`{revision[:NUM_REVISION_CHARACTERS]}`" if revision else "not recorded",
        licence=str(licence) if licence else None,
        mebibytes=sum(entry.size for entry in files) / MIB,
        used_by=tuple(_use(user, made) for user in promoted.lineage if user.stands_on(made)),
    )


def _use(user: LineageArtifact, dataset: LineageArtifact) -> str:
    """Describe a stage's use of a dataset for the card: the stage's name, and how many rows and tokens it read."""
    metrics = user.result.metrics
    is_mixture = f"num_rows.{dataset.record.stage}" in metrics
    end = f".{dataset.record.stage}" if is_mixture else ""
    counts = [f"{metrics[name + end]:.0f} {word}" for name, word in COUNTS.items() if name + end in metrics]
    return f"`{user.record.stage}`" + (f" ({', '.join(counts)})" if counts else "")


def _step(made: LineageArtifact) -> StepRow:
    config = dict(made.config)
    for block in (config.get("data"), config.get("adapter")):
        config |= block if isinstance(block, dict) else {}
    if config.get("steps"):
        del config["epochs"]  # `steps` overrides them
    settings = [f"{name} {config[name]}" for name in SETTINGS if isinstance(config.get(name), str | int | float)]
    tags = [f"{name} {made.result.tags[name]}" for name in TAGS if name in made.result.tags]
    measured = [f"{name} {made.result.metrics[name]:.6g}" for name in MEASURED if name in made.result.metrics]
    return StepRow(made.label, made.record.kind, (*settings, *tags), tuple(measured))


def _losses(made: LineageArtifact) -> Iterator[LossRow]:
    if _relation(made) in ("quantized", "merge"):
        found = made.result.metrics
        yield from (LossRow(made.label, name, found[name]) for name in LOSSES if name in found)


def _scores(evaluation: LineageArtifact) -> Iterator[Score]:
    metrics, num_samples = evaluation.result.metrics, samples_by_score(evaluation.folder)
    for name, value in metrics.items():
        if "." in name and not name.endswith(STANDARD_ERROR):
            yield Score(name, value, metrics.get(f"{name}{STANDARD_ERROR}"), num_samples.get(name))


def _limits(
    promoted: PromotedModel, licence: Licence | None, sources: list[SourceRow], scores: list[Score]
) -> Iterator[str]:
    """Yield sentences for the model card about the model's limitations, such as tasks that were not evaluated."""
    tasks = ", ".join(dict.fromkeys(score.name.partition(".")[0] for score in scores)) or "no task"
    yield f"It was evaluated on {tasks} only; nothing is known of its safety, its biases and all other tasks."
    if licence is None:
        yield "Its licence is not stated: neither the recipe nor the card of its base says one."
    if unstated := [f"`{source.label}`" for source in sources if not source.licence]:
        yield f"The licence of {', '.join(unstated)} is not known; ask its authors before you use this."
    blocks = [made.config["data"] for made in promoted.lineage if "data" in made.config]
    if lengths := [data["sequence_length"] for data in blocks if data.get("sequence_length")]:
        yield f"It was trained on rows of at most {max(lengths)} tokens."
    if any(_relation(made) == "quantized" for made in promoted.lineage):
        yield "It is quantized: its answers are not those of the model before, see above."
    if promoted.model.record.product == "adapter" and not repository_of(promoted.bases[0]):
        yield f"It is of use on its base `{promoted.bases[0].label}` alone, which is not published with it."


def stated_licence(promoted: PromotedModel, licence: str | None) -> Licence | None:
    """Return the licence of the published model. licence: from the recipe; None takes the base model's."""
    return Licence(licence) if licence else licence_of([promoted.model, *promoted.bases])


def licence_of(made: Iterable[LineageArtifact]) -> Licence | None:
    """Return the licence from the card of the first artifact that states a valid one; None if none does."""
    return next((found for one in made if (found := _read(one.content / "README.md"))), None)


def licence_files(made: Iterable[LineageArtifact]) -> dict[str, Path]:
    """Return the licence and notice files of the first artifact that has some, by file name."""
    for one in made:
        found = {path.name: path for path in sorted(one.content.iterdir()) if LICENCE_FILES.fullmatch(path.name)}
        if found:
            return found
    return {}


def _read(card: Path) -> Licence | None:
    metadata = _METADATA.match(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    if metadata is None:
        return None
    try:
        check_bounds(metadata[1], yaml.SafeLoader)
        content = yaml.safe_load(metadata[1])
    except (RecipeError, yaml.YAMLError):  # the card is not ours
        return None
    fields = content if isinstance(content, dict) else {}
    name, own_name, link = (str(fields.get(key) or "") for key in ("license", "license_name", "license_link"))
    if not _NAME.fullmatch(name):
        return None
    return Licence(name, own_name if _NAME.fullmatch(own_name) else None, link if _LINK.fullmatch(link) else None)
