"""Routers in Transformers' mixture-of-experts models: finding, freezing and checking them."""

from typing import Any

from torch import nn

from stages.core.errors import ModelError
from stages.engines.settings import MoeSettings

NAMES = ("gate", "router")
"""Attribute names under which Transformers' mixture-of-experts layers store the router, next to `experts`."""


def routers_of(causal_lm: nn.Module) -> list[nn.Module]:
    """Return the router module of each mixture-of-experts layer."""
    beside_experts = [
        module for module in causal_lm.modules() if isinstance(getattr(module, "experts", None), nn.Module)
    ]
    found = (getattr(module, name, None) for module in beside_experts for name in NAMES)
    return [router for router in found if isinstance(router, nn.Module)]


def freeze_routers(causal_lm: nn.Module) -> None:
    """Freeze the router weights of all mixture-of-experts layers."""
    for router in routers_of(causal_lm):
        router.requires_grad_(False)


def check_mixture(causal_lm: Any, moe: MoeSettings) -> None:
    """Raise ModelError for options of `moe` that need routers, or Transformers' load-balancing loss, where none is."""
    if moe == MoeSettings():
        return
    name = type(causal_lm).__name__
    if not routers_of(causal_lm):
        raise ModelError(f"`moe` is for mixtures of experts, and {name} has no routers beside experts; remove it")
    if moe.aux_loss_coefficient and not _gives_router_logits(causal_lm):
        raise ModelError(
            f"`moe.aux_loss_coefficient` needs what routers give, and Transformers' {name} does not tell it: it has no "
            "loss that balances experts; remove it"
        )


def _gives_router_logits(causal_lm: Any) -> bool:
    """Return whether Transformers has a load-balancing loss for this architecture."""
    has_loss = hasattr(causal_lm.config.get_text_config(), "router_aux_loss_coef")
    return has_loss and hasattr(causal_lm, "num_experts_per_tok")
