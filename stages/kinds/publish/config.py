"""Config of a publication."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from stages.core.contract import StageConfig
from stages.core.fields import Product, Reference
from stages.kinds.publish.targets.registry import forms, parse_address


class PublishConfig(StageConfig):
    """Send a promoted model to where others find it, with a model card written from the records."""

    STAGE_VERSION: ClassVar[int] = 1
    HAS_CHECK: ClassVar[bool] = True

    kind: Literal["publish"]
    promotion: Annotated[str, Reference(("verdict",))] = Field(
        description="Promote stage of the model; a candidate that was not promoted is not published."
    )
    to: Annotated[str, AfterValidator(lambda text: str(parse_address(text)))] = Field(
        description=f"Place to publish to: {forms()}."
    )
    private: bool = Field(True, description="Make a repository on a hub visible only to its owner.")
    license: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.+-]{0,63}$",
        description="Licence of the model, for the card; default: the licence in the card of its base.",
    )
    dry_run: bool = Field(False, description="Only write the card and the list of files; send nothing.")

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
