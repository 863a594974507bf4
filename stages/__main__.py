"""Program of a stage's process, `python -m stages WORK_FOLDER`, which runs the stage that the folder describes.

Reads `config.json`, runs the stage's kind, writes `result.json` or `error.json`, and exits with 0 or the error class's
code.
"""

import contextlib
import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from stages.core.contract import StageConfig, StageContext, StageFailure, StageInput, StageResult, is_main_process
from stages.core.errors import INTERNAL_ERROR, LifecycleError, ResourceError, class_name, full_disk_named, is_full_disk
from stages.core.files import write_atomically
from stages.core.garbage import collect_rarely, imports_uncollected
from stages.core.process_tree import die_with_parent
from stages.core.redaction import redact


def main() -> None:
    """Run the stage in the work folder that the command line names, and exit with an error's code if it fails."""
    die_with_parent()
    collect_rarely()
    work = Path(sys.argv[1])
    try:
        with full_disk_named("running the stage", work):
            run_stage(work)
    except LifecycleError as error:
        fail(work, error, error.exit_code)
    except Exception as error:
        traceback.print_exc()
        fail(work, error, INTERNAL_ERROR)


def run_stage(work: Path) -> None:
    """Run the stage that `config.json` in the work folder describes, and write `result.json`."""
    stage_input = StageInput.model_validate_json((work / "config.json").read_text())
    with imports_uncollected():
        kind = importlib.import_module(f"stages.kinds.{stage_input.kind}.run")
        # Its effect on the whole process is why `run` does not do it.
        getattr(kind, "prepare_process", lambda: None)()
    run = kind.run
    # Those of all kinds would take longer to import than a download of little takes.
    config_class: type[StageConfig] = inspect.get_annotations(run, eval_str=True)["config"]
    config = config_class.model_validate(stage_input.config)
    context = StageContext(
        work,
        stage_input.name,
        stage_input.version,
        stage_input.inputs,
        stage_input.leases,
        stage_input.cache,
        stage_input.outside,
        stage_input.trial,
    )
    for warning in stage_input.warnings:
        context.warn(warning)
    outcome = run(config, context)
    for result in (outcome,) if isinstance(outcome, StageResult) else outcome:
        if is_main_process():
            refused = result.refused_for(context.findings)
            write_atomically(work / "result.json", refused.model_dump_json(indent=2))


def fail(work: Path, error: Exception, exit_code: int) -> NoReturn:
    """Write the error that ended the stage to `error.json`, unless another process did, and exit with the given code.

    A server that ends after its stage's result was written only leaves an exit code, as its artifact is complete.
    """
    if not any((work / name).exists() for name in ("error.json", "result.json")) and work.exists():
        try:
            write_atomically(work / "error.json", StageFailure.of(error).model_dump_json(indent=2))
        except OSError as why:
            exit_code = ResourceError.exit_code if is_full_disk(why) else exit_code  # the code is all that can be left
    with contextlib.suppress(OSError):
        print(redact(f"{class_name(error)}: {error}"), file=sys.stderr, flush=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
