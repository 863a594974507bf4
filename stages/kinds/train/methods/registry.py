"""Registry of training methods. To add a method, write a module beside this file and add one line here."""

from functools import cache

from stages.kinds.train.methods.cpo import CPO
from stages.kinds.train.methods.distill import DISTILL
from stages.kinds.train.methods.dpo import DPO
from stages.kinds.train.methods.grpo import GRPO
from stages.kinds.train.methods.kto import KTO
from stages.kinds.train.methods.method import Method
from stages.kinds.train.methods.orpo import ORPO
from stages.kinds.train.methods.reward import REWARD
from stages.kinds.train.methods.sft import SFT
from stages.kinds.train.methods.simpo import SIMPO

METHODS: dict[str, Method] = {
    method.name: method for method in (SFT, DPO, SIMPO, ORPO, CPO, KTO, REWARD, DISTILL, GRPO)
}


@cache
def metric_meanings() -> dict[str, str]:
    """Return a sentence on each method-specific metric, such as `DPO: mean reward of …`, by the metric's name."""
    meanings = {name: meaning for method in METHODS.values() for name, meaning in method.metrics.items()}
    assert all(method.metrics.items() <= meanings.items() for method in METHODS.values()), "a name means one thing"
    return {
        name: f"{', '.join(method.name.upper() for method in METHODS.values() if name in method.metrics)}: {meaning}"
        for name, meaning in meanings.items()
    }
