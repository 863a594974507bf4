"""Config of the publish stage, which sends a promoted model to a hub, bucket, registry or folder."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from stages.core.contract import StageConfig
from stages.core.errors import PublishError
from stages.core.fields import Reference
from stages.kinds.publish.targets.folder import Folder, check_outside
from stages.kinds.publish.targets.registry import forms, parse_address, token_of


class PublishConfig(StageConfig):
    """Config of the publish stage: sends a promoted model, with a model card, to a hub, bucket, registry or folder."""

    STAGE_VERSION: ClassVar[int] = 1
    PRODUCTS = ("publication",)
    HAS_CHECK: ClassVar[bool] = True

    kind: Literal["publish"]
    promotion: Annotated[str, Reference(("verdict",))] = Field(
        description="Promote stage whose candidate is published, if it was promoted."
    )
    to: Annotated[str, AfterValidator(lambda text: str(parse_address(text)))] = Field(
        description=f"Place to publish to: {forms()}."
    )
    private: bool = Field(True, description="Make the repository private (visible only to its owner); only for hubs.")
    license: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.+-]*$",
        max_length=64,
        description="Licence for the card, such as apache-2.0; default: that in the base model's card.",
    )
    dry_run: bool = Field(False, description="Only write the model card and the list of files; send nothing.")

    @property
    def devices(self) -> int:
        return 0

    def target_problems(self, store: Path) -> Iterator[str]:
        """Yield reasons why this machine cannot publish to the target, such as a missing token.

        For a cluster only the shared store is checked; the stage itself checks the rest there.
        """
        address, is_local = parse_address(self.to), self.execution.is_local
        try:
            if address.scheme == "file":
                check_outside(Path(address.place), store)
                if is_local and not self.dry_run:
                    Folder(Path(address.place)).check()
        except PublishError as error:
            yield f"to: {error}"
            return
        variable = token_of(address) if is_local and not self.dry_run else None
        if variable and not {**os.environ, **self.execution.environment}.get(variable):
            yield (
                f"to: {self.to} is written to with a token, and the environment has no {variable}; set it, or set "
                "`dry_run: true`"
            )

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        if not parse_address(self.to).is_hub:
            yield "private", f"who may read {self.to} is not for this to say"
