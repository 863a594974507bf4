"""Plan of a refresh: which stages run, which are cached, and why. Pure: the store is given as an index."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from pydantic import JsonValue

from flows.planning.outside import Outside
from flows.recipe.recipe import Recipe
from flows.recipe.text import closest
from flows.recipe.version import Difference, Identity, differences, identity_of, resume_key_of, version_of
from flows.store.record import Artifact, Index
from stages.core.approval import read_approval
from stages.core.contract import StageConfig, nearest_base
from stages.core.errors import RecipeError
from stages.core.redaction import shortened

Action = Literal["run", "cached"]
FINDING_CHARACTERS = 300
"""Most characters that a plan shows of the reason why a stage rejected the artifact that it had made."""


@dataclass(frozen=True)
class PlannedStage:
    """Stage of a plan: its version, its config, and whether it runs or is cached, with the reason.

    upstream: stages that it refers to. ancestors: all that it depends on. One whose action is `run` may still be found
    cached when its turn comes: when its version exists and its ancestors were rebuilt with the same content.
    """

    recipe: str
    name: str
    kind: str
    version: str
    resume_key: str
    identity: Identity
    config: StageConfig
    upstream: tuple[str, ...]
    ancestors: tuple[str, ...]
    action: Action
    reason: str
    differences: tuple[Difference, ...] = ()
    forced: bool = False


@dataclass(frozen=True)
class Plan:
    """Plan of a refresh: its stages in topological order, each with the decision whether it runs."""

    recipe: str
    stages: dict[str, PlannedStage]
    unknown: dict[str, str] = field(default_factory=dict)
    """Reasons why versions of stages are not known yet, by stage name, such as a hub that did not answer."""

    def base_of(self, name: str) -> str | None:
        """Return the name of the stage that provides the base model of an adapter stage; None for other stages."""
        config = self.stages[name].config
        return nearest_base(config.references()) if config.product == "adapter" else None


@dataclass(frozen=True)
class Decision:
    """Decision whether a stage runs or is cached, with the reason."""

    action: Action
    reason: str
    differences: tuple[Difference, ...] = ()


def chosen_stages(recipe: Recipe, until: str | None) -> tuple[str, ...]:
    """Return the names of all stages, or of `until` and its ancestors. Raises RecipeError if there is no such stage."""
    if until is None:
        return tuple(recipe.stages)
    _check_names(recipe, [until])
    return (*recipe.ancestors_of(until), until)


def plan(
    recipe: Recipe,
    outside: Outside,
    index: Index,
    *,
    force: Collection[str] = (),
    until: str | None = None,
    unreachable: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Decide for each stage, or those up to `until`, whether it runs or is cached, with the reason.

    outside, unreachable: of these stages, from `resolve_outside`. Raises `RecipeError` when `force` or `until` names a
    stage that the recipe lacks.
    """
    _check_names(recipe, force)
    planned: dict[str, PlannedStage] = {}
    for name in chosen_stages(recipe, until):
        planned[name] = _plan_stage(recipe, name, outside[name], index, planned, name in force)
    return Plan(recipe.name, planned, _unknown(planned, unreachable))


def _plan_stage(
    recipe: Recipe,
    name: str,
    outside: dict[str, JsonValue],
    index: Index,
    planned: Mapping[str, PlannedStage],
    forced: bool,
) -> PlannedStage:
    config = recipe.stages[name]
    # Stages are in topological order, so those upstream are planned already.
    versions = {stage: planned[stage].version for stage in recipe.upstream_of(name)}
    identity = identity_of(config, versions, outside)
    version = version_of(identity)
    artifact = index.find(config.kind, version)
    if forced:
        decision = Decision("run", "forced")
    elif artifact is None:
        decision = _decide_unbuilt(index.nearest(config.kind, name, identity), identity)
    else:
        decision = _decide_built(name, artifact, config.references(), index, planned)
    return PlannedStage(
        recipe=recipe.name,
        name=name,
        kind=config.kind,
        version=version,
        resume_key=resume_key_of(config, versions, outside),
        identity=identity,
        config=config,
        upstream=recipe.upstream_of(name),
        ancestors=recipe.ancestors_of(name),
        action=decision.action,
        reason=decision.reason,
        differences=decision.differences,
        forced=forced,
    )


def _unknown(planned: Mapping[str, PlannedStage], unreachable: Mapping[str, str]) -> dict[str, str]:
    unknown = dict(unreachable)
    for name, stage in planned.items():
        for ancestor in stage.ancestors:
            if ancestor in unreachable:
                unknown.setdefault(name, f"stands on {ancestor}, whose version is not known")
    return unknown


def _decide_unbuilt(nearest: Artifact | None, identity: Identity) -> Decision:
    if nearest is None:
        return Decision("run", "first build")
    differing = tuple(differences(nearest.record.identity, identity))
    shown = "; ".join(map(str, differing)) or "only in fields that one of the two leaves unset"
    return Decision("run", f"differs from version {nearest.record.version}: {shown}", differing)


def _decide_built(
    name: str, artifact: Artifact, references: Mapping[str, str], index: Index, planned: Mapping[str, PlannedStage]
) -> Decision:
    # Damaged artifacts are not built over in silence: only `--force` does so.
    if artifact.damage:
        damage = "; ".join(artifact.damage)
        return Decision("run", f"damaged on disk ({damage}), so it would stop here; `--force {name}` builds it again")
    # An upstream stage that runs may produce the same content again; then this one is found cached at its turn.
    uncertain = [stage for stage in references.values() if planned[stage].action == "run"]
    if uncertain:
        return Decision("run", f"only if the content of {uncertain[0]} changes, which runs before it")
    digests = {
        field: upstream.record.digest
        for field, stage in references.items()
        if (upstream := index.find(planned[stage].kind, planned[stage].version))
    }
    stale = artifact.record.stale_field(digests)
    if stale:
        return Decision("run", f"upstream {references[stale]} was rebuilt with other content")
    if artifact.pending:
        approval = read_approval(artifact.folder)
        known = "its verdict has yet to reach MLflow's registry" if approval is None else f"it {approval.text}"
        return Decision("run", f"judged, but {known}")
    finding = artifact.record.finding
    refusal = f", and refused since then: {shortened(str(finding), FINDING_CHARACTERS)}" if finding else ""
    place = f", received from {artifact.elsewhere} at its turn" if artifact.elsewhere else ""
    return Decision("cached", f"built {artifact.record.finished:%Y-%m-%d %H:%M} UTC{place}{refusal}")


def _check_names(recipe: Recipe, names: Collection[str]) -> None:
    for name in names:
        if name not in recipe.stages:
            raise RecipeError(f"the recipe {recipe.name} has no stage `{name}`{closest(name, recipe.stages)}")
