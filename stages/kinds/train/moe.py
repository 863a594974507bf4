"""What a recipe may say of the routers of a mixture of experts, and what does not go with it."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from stages.core.numbers import NonNegativeFp32
from stages.core.strict import StrictModel
from stages.engines.settings import MoeSettings


class MoeConfig(StrictModel):
    """Of models that send each token to some of their experts."""

    aux_loss_coefficient: NonNegativeFp32 = Field(
        0.0,
        description="What the loss that balances experts is multiplied by before it is added: Transformers' "
        "`router_aux_loss_coef`; Megatron's `moe_aux_loss_coeff` is this × experts per token / mixture layers.",
    )
    freeze_router: bool = Field(False, description="Leave the weights of routers as they are.")

    @property
    def settings(self) -> MoeSettings:
        """As an engine takes it."""
        return MoeSettings(self.aux_loss_coefficient, self.freeze_router)


def moe_errors(moe: MoeConfig, *, has_adapter: bool) -> Iterator[str]:
    """A sentence for each thing that does not go with it."""
    if moe.freeze_router and has_adapter:
        yield (
            "`moe.freeze_router` has no effect with `adapter`, whose base is frozen; remove it, and leave routers out "
            "of the adapter by `adapter.exclude_modules`"
        )
