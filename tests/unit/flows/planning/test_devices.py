"""GPUs divided between training and sampling: each process sees only its own, and mistakes fail the plan."""

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flows.launch import local
from flows.ledger import machine
from flows.planning.devices import check_devices, device_notes, on_devices, wanted_slots
from flows.planning.layout_choice import check_shared_devices, choose_layouts
from flows.planning.model_shape import ModelConfigs
from flows.planning.plan import Plan, plan
from flows.recipe.recipe import Recipe, load_recipe
from flows.store.record import Index
from stages.core.errors import LayoutError, ResourceError
from stages.kinds.train.rollouts.own_server import gpus_beside_training
from stages.parallel.engines import fsdp

RECIPE = Path(__file__).parents[4] / "configs" / "qwen3-8b-grpo-8gpu.yaml"
beside_training = partial(gpus_beside_training, "CUDA_VISIBLE_DEVICES", shared=False)


def install_torch_for(folder: Path, monkeypatch: pytest.MonkeyPatch, cuda: str) -> None:
    """Fake the version of the installed torch: its metadata names this CUDA version, its code is unchanged."""
    (folder / "site" / "torch").mkdir(parents=True, exist_ok=True)
    (folder / "site" / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n")
    (folder / "site" / "torch-2.13.0.dist-info").mkdir(exist_ok=True)
    (folder / "site" / "torch-2.13.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
    monkeypatch.syspath_prepend(folder / "site")


@pytest.fixture
def eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the driver's list of eight H100 GPUs, and the version of a torch that was built for them."""
    install_torch_for(tmp_path, monkeypatch, "'13.0'")
    monkeypatch.setattr(machine, "GPUS", tmp_path)
    for number in range(8):
        (tmp_path / f"0000:{number:02x}:00.0").mkdir()
        (tmp_path / f"0000:{number:02x}:00.0" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\n")


def loaded(*overrides: str, visible: str | None = None) -> Recipe:
    """Load the GRPO recipe with overrides, and optionally CUDA_VISIBLE_DEVICES in the stage's environment."""
    recipe = load_recipe(RECIPE, [f"stages.grpo.{one}" for one in overrides])
    if visible is None:
        return recipe
    config = recipe.stages["grpo"]
    execution = config.execution.model_copy(update={"environment": {"CUDA_VISIBLE_DEVICES": visible}})
    return replace(recipe, stages={**recipe.stages, "grpo": config.model_copy(update={"execution": execution})})


def planned(recipe: Recipe) -> Plan:
    """Return a plan of the GRPO recipe that contains the GRPO stage alone."""
    found = plan(recipe, {stage: {"revision": "recorded"} for stage in recipe.stages}, Index(()))
    return replace(found, stages={"grpo": found.stages["grpo"]})


def test_processes_train_on_the_first_gpus_and_the_server_gets_the_rest(eight_gpus: None) -> None:
    check_devices(planned(loaded()))
    stage = planned(loaded()).stages["grpo"]
    assert wanted_slots(stage.config, 8) == 8
    environment = local.environment(on_devices(stage, range(8)).config)
    of_a_rank = {**environment, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7", "a process trains on the one of its local rank"
    assert beside_training(of_a_rank, 8, 4) == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_gpus_that_a_recipe_names_are_divided_in_their_order(eight_gpus: None) -> None:
    recipe = loaded("layout.dp_shard=2", "grpo.serving.tensor_parallel_size=1", visible="7,2,5")
    check_devices(planned(recipe))
    (note,) = device_notes(recipe, ["base", "grpo"])
    assert "2 devices train, 1 samples completions: CUDA_VISIBLE_DEVICES 7,2 and 5" in note
    environment = local.environment(on_devices(planned(recipe).stages["grpo"], [0, 1, 2]).config)
    of_a_rank = {**environment, "LOCAL_WORLD_SIZE": "2"}
    assert beside_training(of_a_rank, 8, 1) == {"CUDA_VISIBLE_DEVICES": "5"}
    with pytest.raises(ResourceError, match=r"takes 2 devices .* 2 of the 3 visible ones .* give the stage 4"):
        beside_training(of_a_rank, 8, 2)
    assert beside_training({}, 4, 3) == {"CUDA_VISIBLE_DEVICES": "1,2,3"}, "one process, all seen"


def test_a_gpu_that_both_phases_do_not_fit_is_refused_before_anything_runs(eight_gpus: None) -> None:
    path = RECIPE.with_name("qwen3-0.6b-grpo-one-gpu.yaml")
    for kv_cache_gib, problem in (
        (2, None),
        (78, r"stages\.grpo\.layout: .* while completions are sampled: predicted"),
    ):
        recipe = load_recipe(path, [f"stages.grpo.grpo.serving.kv_cache_memory_gib={kv_cache_gib}"])
        with pytest.raises(LayoutError, match=problem) if problem else contextlib.nullcontext():
            check_shared_devices(recipe, ["base", "grpo"], ModelConfigs(recipe, {}, Index(())))


def test_one_device_trains_and_two_sample() -> None:
    (note,) = device_notes(loaded("layout.dp_shard=1", "grpo.serving.tensor_parallel_size=2"), ["grpo"])
    assert note.startswith("grpo: 1 device trains, 2 sample completions")


@pytest.mark.parametrize(
    ("overrides", "visible", "problem"),
    [
        (["layout.dp_shard=8"], None, r"12 GPUs \(8 devices train, 4 sample .*\), this machine has 8"),
        (["execution.slots=4"], None, r"8 GPUs .*, but execution\.slots is 4; .* leave `slots` out"),
        ([], "0,1,2,3", r".* names 4 \(0,1,2,3\); name as many, each once"),
        ([], "0,1,2,3,3,4,5,6", r".* names 7 .* name as many, each once"),
        ([], "1,2,3,4,5,6,7,8", r"8 GPUs .*, but .* names 8; this machine has 0 to 7"),
        (
            ["execution.launcher=slurm", "execution.slurm.gpus_per_node=4"],
            None,
            r"8 GPUs .*, but execution\.slurm\.gpus_per_node is 4",
        ),
    ],
)
def test_a_stage_that_would_get_too_few_gpus_is_refused(
    eight_gpus: None, overrides: list[str], visible: str | None, problem: str
) -> None:
    with pytest.raises(ResourceError, match=rf"stage grpo wants {problem}"):
        check_devices(planned(loaded(*overrides, visible=visible)))


def test_an_automatic_layout_leaves_the_server_its_gpus(eight_gpus: None) -> None:
    overrides = ["stages.grpo.layout=auto", "stages.grpo.grpo.serving.tensor_parallel_size=4"]
    recipe = load_recipe(RECIPE.with_name("quickstart-grpo.yaml"), overrides)
    chosen, _ = choose_layouts(recipe, ["grpo"], ModelConfigs(recipe, {"base": {"revision": "1"}}, Index(())))
    assert chosen.stages["grpo"].layout.world_size == 4
    assert chosen.stages["grpo"].devices == 8


def test_a_stage_that_is_to_see_no_gpus_may_run_beside_them(eight_gpus: None) -> None:
    check_devices(planned(loaded("layout.dp_shard=8", visible="")))


def test_gpus_that_torch_was_built_without_are_not_silently_left_alone(
    eight_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch_for(tmp_path, monkeypatch, "None")
    message = (
        r"stage grpo: choosing the device to train on: the driver lists 8 NVIDIA GPUs, but torch 2\.13\.0 was built "
        r"without them, .*`make environments`.* CUDA_VISIBLE_DEVICES to .* to train on the CPU"
    )
    with pytest.raises(ResourceError, match=message):
        check_devices(planned(loaded()))
    check_devices(planned(loaded(visible="")))
    check_devices(planned(loaded("execution.launcher=slurm", "execution.slurm.gpus_per_node=8")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    check_devices(planned(loaded()))


@pytest.mark.parametrize(
    ("model", "installed", "problem"),
    [
        ("NVIDIA A100-SXM4-80GB", True, r"`precision: fp8`: NVIDIA A100-SXM4-80GB does not multiply in 8 bits; set"),
        ("NVIDIA H100 80GB HBM3", False, r"torchao, which is not installed here; install it \(`pip install"),
        (None, True, r"`precision: fp8` is for NVIDIA GPUs, and this machine has none; set `precision: bf16`"),
        ("NVIDIA H100 80GB HBM3", True, None),
    ],
)
def test_products_in_8_bits_are_refused_where_they_cannot_be_had(
    eight_gpus: None, monkeypatch: pytest.MonkeyPatch, model: str | None, installed: bool, problem: str | None
) -> None:
    for file in machine.GPUS.glob("*/information"):
        file.unlink() if model is None else file.write_text(f"Model: {model}\n")
    monkeypatch.setattr(fsdp.importlib.util, "find_spec", lambda name: installed or None)
    refused = pytest.raises(ResourceError, match=rf"stage grpo: .*{problem}") if problem else contextlib.nullcontext()
    with refused:
        check_devices(planned(loaded("precision=fp8")))
    check_devices(planned(loaded("precision=fp8", "execution.launcher=slurm", "execution.slurm.gpus_per_node=8")))
