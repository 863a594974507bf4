"""Processes that build models or only read tokenizers do not import packages that they do not use.

What packages of GPU kernels replace in Transformers computes for tensors on GPUs alone.
"""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers.integrations import use_kernel_func_from_hub_with_fallback

from stages.core.contract import StageInput
from stages.models.device_kernels import use_kernels_on_gpus_alone

PACKAGE = "gpu_kernels"

PROGRAM = """
import sys
from importlib.util import find_spec
from pathlib import Path
from stages.rewards.reward import RewardContext
from stages.rewards.reward_model import RewardModelReward
inputs = {"judge": Path("still to be trained")}
with RewardModelReward(type="reward_model", model="judge").opened("judge", RewardContext(inputs, Path("kept"), print)):
    pass
import stages.kinds.merge.merging
assert "peft" not in sys.modules
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from stages.adapters.config import AdapterConfig
from stages.adapters.lora import add_adapter
with torch.device("meta"):
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=1))
add_adapter(model, AdapterConfig(rank=2), seed=0, has_weights=False)
unused = ("sklearn", "scipy", "torchao", "torchvision", "av", "soundfile", "soxr")
print(*(name for name in unused if name in sys.modules))
from stages.models.start_up import find_torchvision
find_torchvision()
from transformers import image_utils, video_utils
assert len(image_utils.pil_torch_interpolation_mapping) == 6 and image_utils.InterpolationMode
assert video_utils.torchvision_io
assert find_spec("sklearn") and find_spec("scipy") and find_spec("torchao")
"""
TOKENIZERS = """
import sys
from importlib.metadata import packages_distributions
from stages.models.start_up import hide_unused_packages, import_tokenizers, import_utils
packages = ("torch", "accelerate", "yaml", "PIL")
hide_unused_packages()
import_tokenizers()
from transformers import AutoTokenizer
assert not {"transformers.generation.utils", "transformers.modeling_utils", "torch._dynamo"} & {*sys.modules}
if hasattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING"):
    distributions = import_utils.PACKAGE_DISTRIBUTION_MAPPING
    assert not distributions, "listed before a rare one is asked for"
    assert [distributions.get(name) for name in packages] == [packages_distributions()[name] for name in packages]
else:  # later versions of Transformers wait themselves (5.24)
    assert not import_utils._package_distribution_mapping.cache_info().currsize

from transformers import GenerationMixin, PreTrainedModel
from transformers.models.auto import auto_factory

class CameWithItsModel(PreTrainedModel):
    def prepare_inputs_for_generation(self):
        pass

print(issubclass(auto_factory.add_generation_mixin_to_remote_model(CameWithItsModel), GenerationMixin))
"""

TRAINING = """
import gc, sys
from pathlib import Path
from stages.__main__ import run_stage
from stages.core.garbage import collect_rarely
collect_rarely()
collections = []
gc.callbacks.append(lambda phase, _: collections.append(phase))
try:
    run_stage(Path(sys.argv[1]))
except ValueError as error:
    assert "learning_rate" in str(error)
assert not collections, "of garbage, among packages that stay"
assert "transformers.models.auto.tokenization_auto" in sys.modules

import transformers
from transformers.utils import import_utils
import stages.engines.fsdp.engine
assert not {"peft", "accelerate", "matplotlib", "prometheus_client", "torchvision", "av", "soundfile"} & {*sys.modules}
import transformers.models
names = import_utils.define_import_structure(str(Path(transformers.__file__).parent / "models" / "__init__.py"))
alone = import_utils._LazyModule("transformers.models", transformers.models.__file__, names)
assert transformers.models._class_to_module == alone._class_to_module
assert dir(transformers.models) == dir(alone)
import peft, accelerate
print(peft.peft_model.dispatch_model is accelerate.dispatch_model)
"""


FORKS = """
import os, sys, torch, stages.models.start_up
for number, program in enumerate(sys.argv[1:4]):
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    os.dup2(os.open(f"{sys.argv[4]}/{number}.txt", os.O_WRONLY | os.O_CREAT), 1)
    sys.argv = sys.argv[3:]
    exec(program, {"__name__": "__main__"})
    sys.exit()
"""
"""Program that runs each of three programs in a fork of itself, which has imported what all of them import."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Provide the exit code and the output of the programs for training, adapters and tokenizers, and all errors."""
    folder = tmp_path_factory.mktemp("stage")
    # Without any field: the process has imported and prepared everything by the time that it reads the config.
    nothing = StageInput(name="sft", kind="train", version="0" * 12, config={"kind": "train"}, inputs={}, cache=folder)
    (folder / "config.json").write_text(nothing.model_dump_json())
    command = [sys.executable, "-c", FORKS, TRAINING, PROGRAM, TOKENIZERS, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360)
    outputs = [(folder / f"{number}.txt").read_text().strip() for number in range(3)]
    return list(zip(done.stdout.split(), outputs, strict=True)), done.stderr


def test_training_does_without_what_only_adapters_and_other_ways_to_load_need(ended):
    assert ended[0][0] == ("0", "True"), ended[1]


def test_models_do_without_packages_that_everybody_else_still_finds(ended):
    assert ended[0][1] == ("0", ""), ended[1]


def test_tokenizers_do_without_what_models_need_which_then_find_it(ended):
    assert ended[0][2] == ("0", "True"), ended[1]


def doubled(states, *, scale=1.0):
    """Stand for what Transformers computes by torch."""
    return 2 * states * scale


@pytest.fixture
def modeling(monkeypatch):
    """Provide the code of a model whose functions Transformers has replaced by those of an installed package."""
    package = ModuleType(PACKAGE)
    package.doubled = lambda states, *, scale=1.0, chunk=64: f"on {states.device.type} by {chunk}"
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    decorated = {
        "doubled": use_kernel_func_from_hub_with_fallback("doubled", PACKAGE)(doubled),
        "missing": use_kernel_func_from_hub_with_fallback("missing", "no_such_package")(doubled),
    }
    module = ModuleType("modeling")
    vars(module).update(decorated, use_kernel_func_from_hub_with_fallback=use_kernel_func_from_hub_with_fallback)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = type("Mixer", (torch.nn.Module,), {"__module__": module.__name__})()
    for _ in range(2):  # several models are made of the same code
        use_kernels_on_gpus_alone(model)
    return module


def test_a_cpu_gets_what_transformers_computes_itself(modeling):
    states = torch.arange(3.0)
    assert torch.equal(modeling.doubled(states, scale=0.5, chunk=32), states)
    assert torch.equal(modeling.missing(states), 2 * states)
    assert modeling.doubled(states.to("meta")).device.type == "meta"


def test_another_device_gets_what_the_package_computes(modeling):
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    assert modeling.doubled(on_gpu, chunk=32) == "on cuda by 32"
    assert modeling.doubled(states=on_gpu) == "on cuda by 64"


def test_a_package_with_models_of_its_own_brings_none(tmp_path):
    (tmp_path / "fla" / "models").mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").write_text("")
    (tmp_path / "fla" / "models" / "__init__.py").write_text("")
    program = (
        "from stages.models.device_kernels import keep_models_of_transformers\n"
        "keep_models_of_transformers()\n"
        "import fla\n"
        "try:\n    import fla.models\n"
        "except ModuleNotFoundError as error:\n    assert error.name == 'fla.models'\n"
        "else:\n    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": f".:{tmp_path}"})
