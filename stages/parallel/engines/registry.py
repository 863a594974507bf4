"""Registry of the rules about what each training engine supports, by engine name.

A new engine is a module beside this one, its name in `layout.py`, a line here, and one in
`stages.planner.engines.registry` and `stages.engines.registry`.
"""

from stages.parallel.engines.fsdp import FsdpRules
from stages.parallel.engines.megatron import MegatronRules
from stages.parallel.engines.rules import EngineRules, Feature
from stages.parallel.layout import EngineName

RULES: dict[EngineName, EngineRules] = {rules.name: rules for rules in (FsdpRules(), MegatronRules())}


def engines_with(feature: Feature) -> str:
    """Return the names of the engines that have a feature, joined by "or" for an error message."""
    return " or ".join(name for name, rules in RULES.items() if rules.has(feature))


def lacked_feature(engine: EngineName, feature: Feature, option: str) -> list[str]:
    """Return the error, in a list, for a recipe option that needs a feature which the engine lacks; else []."""
    why = RULES[engine].lacks.get(feature)
    return [] if why is None else [needs_other_engine(option, engine, engines_with(feature), why)]


def needs_other_engine(option: str, engine: EngineName, engines: str, why: str = "") -> str:
    """Return the error for a recipe option, such as "`precision: fp8`", that only other engines support."""
    return f"{option} needs `engine: {engines}`, found {engine}{why}; change either"
