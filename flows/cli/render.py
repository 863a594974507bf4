"""Kubernetes manifests of a recipe's stage, for `lifecycle render`: the stage's job, or a serve stage's server."""

from pathlib import Path

from flows.launch.cluster import order_of
from flows.launch.manifests import Manifest, job_manifests
from flows.launch.serving_manifests import Replicas, serving_manifests
from flows.ledger.home import home
from flows.planning.plan import PlannedStage
from flows.running.request import PlannedRefresh, RefreshRequest, make_plan
from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.errors import RecipeError
from stages.core.launchers.kubernetes import KubernetesOptions
from stages.kinds.serve.config import ServeConfig


def stage_manifests(recipe: Path, stage: str, overrides: tuple[str, ...], replicas: Replicas) -> list[Manifest]:
    """Return the Kubernetes manifests of a stage: its job, or for a serve stage the Deployment of its server.

    Raises `RecipeError` when the stage does not run on Kubernetes, or what it serves is not built yet.
    """
    made = make_plan(RefreshRequest(str(recipe.absolute()), overrides, until=stage))
    planned = made.plan.stages[stage]
    if planned.config.product == "server":
        assert isinstance(planned.config, ServeConfig)
        model = _built(made, planned, planned.config.base or planned.config.model) / "model"
        adapters = {name: _built(made, planned, name) / ADAPTER_FOLDER for name in planned.config.served_adapters}
        draft = planned.config.draft
        speculation = planned.config.speculation({draft: _built(made, planned, draft)} if draft else {})
        return serving_manifests(stage, model, planned.version, home(), planned.config, replicas, adapters, speculation)
    if not isinstance(planned.config.execution.options, KubernetesOptions):
        launcher = planned.config.execution.launcher
        raise RecipeError(
            f"stages.{stage}.execution.launcher: found {launcher}, expected kubernetes to render manifests"
        )
    work = made.store.work_folder(planned.kind, planned.name, planned.resume_key)
    command = ["-m", "stages", str(work)]
    return job_manifests(order_of(stage, work, planned.config, command))


def _built(made: PlannedRefresh, planned: PlannedStage, name: str) -> Path:
    """Return the artifact of what a serve stage serves. Raises RecipeError when it is not built yet."""
    upstream = made.plan.stages[name]
    artifact = made.store.find(upstream.kind, upstream.version)
    if artifact is None:
        raise RecipeError(f"{planned.name} serves {name}, which is not built yet; run the recipe first")
    if refusal := artifact.record.refusal(artifact.folder):
        raise refusal
    return artifact.folder
