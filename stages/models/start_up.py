"""Faster start of processes that use Transformers, by leaving out imports that they do not need."""

import importlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


class _Distributions(dict[str, list[str]]):
    """Names of installed distributions by package; all are listed, in 0.2 s, when Transformers asks for a rare one."""

    list_all = staticmethod(metadata.packages_distributions)

    def get(self, package: str, default: Any = None) -> Any:
        if package in ("torch", "accelerate") and any(metadata.distributions(name=package)):
            return [package]
        if not self:
            self.update(self.list_all())
        return super().get(package, default)


metadata.packages_distributions = _Distributions
try:
    import transformers
    from transformers import utils
    from transformers.utils import import_utils
finally:
    metadata.packages_distributions = _Distributions.list_all

AUTO_FACTORY = "transformers.models.auto.auto_factory"
ABOUT_PICTURES = ("transformers.image_utils", "transformers.video_utils")
OF_TORCHVISION = ("InterpolationMode", "torchvision_io")
"""Names that these modules have once they have found torchvision."""


def hide_unused_packages() -> None:
    """Make packages that models do not use look missing to Transformers, so that it does not import them for a model.

    Most imports take over a second; writing docstrings for models, which is left out too, up to a second. Transformers
    uses them for assisted generation, object detection, sound and weights that torchao has quantized. torchvision,
    which every model would import for its sizes of pictures, comes with the first processor (`find_torchvision`).
    """
    for name in ("soundfile", "soxr", "sklearn", "scipy", "torchao"):
        if is_available := getattr(import_utils, f"is_{name}_available", None):  # soxr's came after 5.17
            _remember_missing(name, is_available)
    _import_without_torchvision()
    utils.auto_docstring = _undocumented
    _import_names_of_models()


def _import_without_torchvision() -> None:
    """Import Transformers' modules about pictures, which its models import, as if torchvision were missing.

    Only these: others remember what they missed in lists of their own, and could load no processor later.
    """
    if not {*ABOUT_PICTURES} & {*sys.modules}:
        is_available = import_utils.is_torchvision_available
        _remember_missing("torchvision", is_available)
        for name in ABOUT_PICTURES:
            importlib.import_module(name)
        is_available.cache_clear()


def find_torchvision() -> None:
    """Give Transformers' modules about pictures what they missed of torchvision, before a processor is loaded."""
    for name in ABOUT_PICTURES:
        known = vars(importlib.import_module(name))
        spec = importlib.util.find_spec(name)
        if not import_utils.is_torchvision_available() or not spec or not spec.loader or {*OF_TORCHVISION} & {*known}:
            continue
        # A second copy finds it; classes stay those of the first, which others hold.
        spec.loader.exec_module(copy := importlib.util.module_from_spec(spec))
        for key, value in vars(copy).items():
            if isinstance(known.setdefault(key, value), dict) and not known[key]:
                known[key].update(value)


def start_training_quickly() -> None:
    """Make packages that training does not use, such as accelerate, look missing to Transformers, to start faster.

    accelerate spreads models by `device_map`, which training does itself; PEFT finds it as before. Together this is a
    third of what a training of few steps takes.
    """
    hide_unused_packages()
    _remember_missing("accelerate", import_utils.is_accelerate_available)
    # The first tokenizer brings it: half of a start's objects, imported here where no garbage is collected.
    importlib.import_module("transformers.models.auto.tokenization_auto")


def _import_names_of_models() -> None:
    """Import `transformers.models` from Transformers' cached list of names, which saves 0.3 s of reading files."""
    if "transformers.models" in sys.modules:
        return
    define = import_utils.define_import_structure
    prefix = "models."
    # The answer to these very arguments is cached; names that `transformers` has added to it have no prefix.
    named = define(Path(transformers.__file__).parent / "models", prefix="models")
    own = {
        backends: {module.removeprefix(prefix): names for module, names in modules.items() if module.startswith(prefix)}
        for backends, modules in named.items()
    }
    import_utils.define_import_structure = lambda *_, **__: own
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.define_import_structure = define


def hide_torchao_from_adapters() -> None:
    """Make torchao look missing to PEFT, whose import of it (0.2 s) is only to recognise layers quantized by it."""
    _remember_missing("torchao", importlib.import_module("peft.import_utils").is_torchao_available)


def _remember_missing(name: str, is_available: Any) -> None:
    """Make Transformers' or PEFT's cached availability check (`is_available`) report that a package is missing."""
    before = {name: sys.modules[name]} if name in sys.modules else {}
    missing: Any = None  # means: there is no such package
    sys.modules[name] = missing
    try:
        # The answer of the next line stays cached when the package is there again.
        is_available.cache_clear()
        is_available()
    finally:
        del sys.modules[name]
        sys.modules.update(before)


def import_tokenizers() -> None:
    """Import Transformers' `AutoTokenizer` without what only models need, which takes twice as long as the rest.

    Two things bring that along: the mixin for models whose code came with them, imported here once there is such a
    model, and the docstring of a config, left unwritten. Models can be loaded afterwards as ever.
    """
    if AUTO_FACTORY in sys.modules:
        return
    generation: Any = importlib.import_module("transformers.generation")
    documented = utils.auto_docstring
    utils.auto_docstring = _undocumented
    # Set on a lazily loaded module, whose own attribute is imported only when it is missing.
    generation.GenerationMixin = object
    try:
        factory: Any = importlib.import_module(AUTO_FACTORY)
        importlib.import_module("transformers.models.auto.tokenization_auto")
    finally:
        utils.auto_docstring = documented
        del generation.GenerationMixin  # which is then looked up as before
    add_mixin = factory.add_generation_mixin_to_remote_model  # alone uses what was imported

    def with_real_mixin(model_class: Any) -> Any:
        factory.GenerationMixin = generation.GenerationMixin
        return add_mixin(model_class)

    factory.add_generation_mixin_to_remote_model = with_real_mixin


def _undocumented(documented: Any = None, **_: Any) -> Any:
    """Return the class without a docstring; replaces Transformers' decorator `auto_docstring`."""
    return documented if documented is not None else lambda one: one
