"""What a recipe may say of a publication: whose promotion, and where its model goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from stages.core.contract import StageConfig
from stages.core.fields import Product, Reference
from stages.kinds.publish.targets.registry import forms, parse_address


def _as_address(text: str) -> str:
    return str(parse_address(text))


class PublishConfig(StageConfig):
    """Send what a promotion promoted to where others find it, with a model card written from the records."""

    STAGE_VERSION: ClassVar[int] = 1
    HAS_CHECK: ClassVar[bool] = True

    kind: Literal["publish"]
    promotion: Annotated[str, Reference(("verdict",))] = Field(
        description="A candidate that it did not promote is not published."
    )
    to: Annotated[str, AfterValidator(_as_address)] = Field(description=f"{forms()}.")
    private: bool = Field(True, description="Of a repository on a hub: whether only its owner sees it.")
    license: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.+-]{0,63}$",
        description="Of the model, as the card says it; default: what the card of its base says.",
    )
    dry_run: bool = Field(False, description="Write the card and the list of files, and send nothing.")

    @property
    def product(self) -> Product:
        return "publication"

    @property
    def devices(self) -> int:
        return 0

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        if not parse_address(self.to).is_hub:
            yield "private", f"who may read {self.to} is not for this to say"
