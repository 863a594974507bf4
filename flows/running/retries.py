"""Decision about which failed attempts at a refresh's stages are repeated automatically."""

from flows.planning.plan import PlannedStage
from flows.store.content import SCRATCH_FOLDER
from flows.store.store import Store
from stages.core.errors import LifecycleError, TransientError

NO_PROGRESS = "it died twice without a newer checkpoint between"


class Retries:
    """Decider of automatic retries of failed stages, called by each stage's thread; stages share no state in it.

    A transient error is tried again `execution.retries` times. So is a death, as long as attempts make progress: a
    stage that dies twice without a newer checkpoint in between would die again. All other errors would only repeat.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._decided: dict[str, tuple[int, bool]] = {}
        self._progress_at_death: dict[str, int] = {}

    def decide(self, planned: PlannedStage, number: int, error: BaseException) -> bool:
        """Decide whether a stage is tried again after an error; if not, after repeated deaths, the error says why.

        number: of its attempts in this try of the refresh, the failed one included.
        """
        decided_for, again = self._decided.get(planned.name, (0, False))
        # Once for each attempt: its observer and `build` both ask, and the second look would see no progress.
        if decided_for != number:
            retries = planned.config.execution.retries
            is_worth_it = self._is_worth_it(planned, error)
            again = is_worth_it and number <= retries
            self._decided[planned.name] = number, again
            if isinstance(error, LifecycleError) and error.died and number > 1 and not again:
                reason = f"execution.retries is {retries}" if is_worth_it else NO_PROGRESS
                error.add(f"it is not tried again: {reason}")
        return again

    def is_due(self, stage: str) -> bool:
        """Return whether a stage will be tried again after its latest attempt."""
        return self._decided.get(stage, (0, False))[1]

    def _is_worth_it(self, planned: PlannedStage, error: BaseException) -> bool:
        if not (isinstance(error, LifecycleError) and error.died):
            return isinstance(error, TransientError)
        work = self._store.work_folder(planned.kind, planned.name, planned.resume_key)
        progress = planned.config.progress_kept(work / SCRATCH_FOLDER)
        before, self._progress_at_death[planned.name] = self._progress_at_death.get(planned.name), progress
        return before is None or progress > before
