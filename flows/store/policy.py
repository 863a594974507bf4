"""Retention policy of a lifecycle home: how many old refreshes are kept. Without one, none is removed automatically.

<home>/retention.yaml:

    keep:
      refreshes: 30     of each recipe, the latest
      days: 90          and all that began in that time
      champions: all    or how many versions of each registered model keep their artifacts, the latest
"""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from flows.ledger.home import home
from flows.ledger.record import RefreshRecord
from flows.recipe.text import parse_yaml, read_text
from stages.core.errors import RecipeError
from stages.core.fields import StrictModel
from stages.core.redaction import quoted

MS_PER_DAY = 86_400_000
LONGEST_VALUE = 60
ALLOWED = {
    "": "a mapping with `keep`",
    "keep": "a mapping with `refreshes`, `days` or both, and `champions` if it is to be a number",
    "keep.refreshes": "a whole number, 1 or more",
    "keep.days": "a number above 0",
    "keep.champions": "`all`, or a whole number, 1 or more",
}
WholeNumber = Annotated[int, Field(strict=True, ge=1)]


class RetentionLimits(StrictModel):
    """Limits on the refreshes to keep of each recipe: the latest `refreshes`, and those of the last `days`, if set.

    champions: number of versions; what an alias points to is kept in any case.
    """

    refreshes: WholeNumber | None = None
    days: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    champions: Literal["all"] | WholeNumber = "all"

    def beyond(self, records: Iterable[RefreshRecord], now_ms: int) -> list[RefreshRecord]:
        """Return the refreshes that the retention policy does not keep, without those that run or may run elsewhere."""

        def recipe_of(record: RefreshRecord) -> str:
            return record.recipe

        ended = [one for one in records if one.state != "running"]
        latest_first = sorted(ended, key=lambda one: -one.started_ms)
        # Without `days`: now, so that age alone keeps none; without `refreshes`: from the first one on.
        since_ms = now_ms - (self.days or 0) * MS_PER_DAY
        return [
            record
            # A stable sort: of each recipe the latest still come first.
            for _, of_recipe in groupby(sorted(latest_first, key=recipe_of), recipe_of)
            for record in list(of_recipe)[self.refreshes or 0 :]
            if record.started_ms < since_ms
        ]


class Policy(StrictModel):
    """Contents of `retention.yaml`, the retention policy of a lifecycle home."""

    keep: RetentionLimits


def policy_file() -> Path:
    """Return the path of this lifecycle home's retention policy; the file need not exist."""
    return home() / "retention.yaml"


def read_policy() -> Policy | None:
    """Return this home's retention policy, or None. Raises RecipeError with a wrong field and its allowed values."""
    path = policy_file()
    if not path.exists():
        return None
    text = read_text(path, "the retention policy")
    try:
        policy = Policy.model_validate(parse_yaml(text))
    except ValidationError as error:
        raise RecipeError(f"{path}: {'; '.join(_problems(error))}") from error
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    if policy.keep.refreshes is None and policy.keep.days is None:
        raise RecipeError(f"{path}: keep: names neither `refreshes` nor `days`; expected {ALLOWED['keep']}")
    return policy


def _problems(error: ValidationError) -> list[str]:
    problems = {}
    for details in error.errors():
        path = [str(part) for part in details["loc"]]
        # The longest known beginning, since pydantic adds the members of a union: keep.champions.int -> keep.champions.
        field = next(field for end in range(len(path), -1, -1) if (field := ".".join(path[:end])) in ALLOWED)
        if details["type"] == "extra_forbidden":
            finding = f"there is no field {quoted(path[-1], LONGEST_VALUE)}"
        elif details["type"] == "missing":
            finding = f"`{path[-1]}` is missing"
        else:
            finding = f"found {quoted(details['input'], LONGEST_VALUE)}"
        problems[field] = f"{field or 'the file'}: {finding}; expected {ALLOWED[field]}"
    return list(problems.values())
