"""Problems of a plan, collected over all checks: a person fixes them together, and not one plan after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stages.core.errors import LifecycleError, RecipeError, TransientError


class Problems:
    """Errors in the order in which they were found; a text that was found twice counts once."""

    def __init__(self) -> None:
        self._errors: dict[str, LifecycleError] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the error that a check raises, and go on."""
        try:
            yield
        except LifecycleError as error:
            self.add(error)

    def add(self, error: LifecycleError) -> None:
        """Note an error."""
        self._errors.setdefault(str(error), error)

    def check(self) -> None:
        """Raise what was noted: the error itself, or of several a RecipeError that lists them.

        Several of one class stay of that class. A source that does not answer counts only where nothing else is wrong:
        another attempt would find the other problems again.
        """
        errors = list(self._errors.values())
        if len(errors) == 1:
            raise errors[0]
        kinds = {type(error) for error in errors}
        kinds = kinds - {TransientError} or kinds
        if errors:
            raise (kinds.pop() if len(kinds) == 1 else RecipeError)("\n".join(self._errors))
