"""Resolution of a recipe's inputs from outside the artifact store: file hashes, hub revisions, program versions."""

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pydantic import JsonValue

from flows.recipe.recipe import Recipe
from flows.recipe.version import identity_of
from flows.store.content import hash_path, outside_files
from flows.store.record import Index
from stages.core.contract import StageConfig
from stages.core.errors import EvaluationError, LifecycleError, RecipeError, TransientError
from stages.core.redaction import shortened
from stages.hubs.answers import PLANNING_ATTEMPT_S, PLANNING_LIMIT_S, PLANNING_OFFLINE_LIMIT_S, BackgroundLookups
from stages.hubs.registry import HUBS

Resolved = dict[str, JsonValue]
Outside = dict[str, Resolved]
"""Resolved inputs from outside the store (hashes, revisions, versions): by stage name, then by field path or name."""


def resolve_outside(
    recipe: Recipe,
    stages: Collection[str] | None = None,
    unreachable: MutableMapping[str, str] | None = None,
    failed: MutableMapping[str, LifecycleError] | None = None,
) -> Outside:
    """Resolve the inputs from outside the store of the named stages (default: all): hash files, ask hubs for revisions.

    unreachable: where given, only a plan is made: each source is asked once, all within `PLANNING_LIMIT_S`, and a stage
    whose source does not answer is noted there with the reason, without inputs. failed: where given, takes the error of
    each stage that has one, instead of the first being raised; such a stage, and one that is noted there already, has
    no inputs. Raises `RecipeError` when a path does not exist, and what the stages' own `resolve_outside` raise.
    """
    chosen = {name: config for name, config in recipe.stages.items() if stages is None or name in stages}
    known = {} if failed is None else failed
    known.update(_unreadable_paths(chosen))
    if failed is None and known:
        raise RecipeError("\n".join(map(str, known.values())))
    sound = {name: config for name, config in chosen.items() if name not in known}
    limits_s = (PLANNING_LIMIT_S, PLANNING_OFFLINE_LIMIT_S, PLANNING_ATTEMPT_S)
    limit_s, offline_limit_s, one_attempt_s = (None, None, None) if unreachable is None else limits_s
    hashes, others = BackgroundLookups[str](offline_limit_s), BackgroundLookups[Resolved](None)
    sources = {True: BackgroundLookups[Resolved](offline_limit_s), False: BackgroundLookups[Resolved](limit_s)}

    def answers_about(name: str) -> BackgroundLookups[Resolved]:
        return sources[HUBS[recipe.fetched[name].source.hub].is_offline] if name in recipe.fetched else others

    # Local files last, while hubs answer.
    here = {name for name, config in recipe.fetched.items() if HUBS[config.source.hub].is_local}
    for name, config in sorted(sound.items(), key=lambda one: one[0] in here):
        answers_about(name).ask(name, partial(config.resolve_outside, one_attempt_s), here=name in here)
    # A path that several stages name is hashed once.
    for path in {path for config in sound.values() for path in config.outside_paths().values()}:
        hashes.ask(str(path), partial(hash_path, path, one_attempt_s), here=True)
    outside: Outside = {name: {} for name in chosen}
    for name, config in sound.items():
        try:
            with _about(recipe, name):
                resolved = {**answers_about(name).of(name)}
            for field, path in config.outside_paths().items():
                with _about(recipe, name, field):
                    resolved[field] = hashes.of(str(path))
            outside[name] = resolved
        except LifecycleError as error:
            if unreachable is not None and isinstance(error, TransientError):
                unreachable[name] = str(error)
            elif failed is not None:
                failed[name] = error
            else:
                raise
    return outside


def as_built_before(recipe: Recipe, name: str, index: Index) -> Resolved | None:
    """Return a stage's outside inputs where its programs are not installed, which a cached artifact does not need.

    Versions are those of the stage's nearest artifact; None for a stage never built.
    """
    config = recipe.stages[name]
    # Only the config counts here: versions of upstream stages are not known at this point.
    nearest = index.nearest(config.kind, name, identity_of(config, dict.fromkeys(recipe.upstream_of(name), ""), {}))
    if nearest is None:
        return None
    before = nearest.record.identity["outside"]
    assert isinstance(before, dict)
    return {**before, **{field: hash_path(path) for field, path in config.outside_paths().items()}}


def _unreadable_paths(stages: Mapping[str, StageConfig]) -> Iterator[tuple[str, LifecycleError]]:
    """Yield each stage with paths that do not exist or cannot be read completely, with an error that lists them."""
    for name, config in stages.items():
        problems = {field: _problem(path) for field, path in config.outside_paths().items()}
        if lines := [f"stages.{name}.{field}: {problem}" for field, problem in problems.items() if problem]:
            yield name, RecipeError("\n".join(lines))


def _problem(path: Path) -> str | None:
    """Return why a file or folder cannot be read completely, or None if it can."""
    try:
        if not path.exists():
            return f"there is no file or folder {path}"
        special = next((file for file in outside_files(path).values() if _is_special(file)), None)
    except OSError as error:
        return f"cannot read {shortened(str(path), 200)}: {error.strerror}"
    return f"{special} is no regular file; name a file, or a folder of files" if special else None


def _is_special(file: Path) -> bool:
    """Return whether reading a file may never end, since it is a device, a pipe, or generated by the kernel."""
    # ("/", "proc"), also behind a symbolic link.
    return not file.is_file() or file.resolve().parts[:2] in (("/", "proc"), ("/", "sys"))


@contextmanager
def _about(recipe: Recipe, name: str, field: str | None = None) -> Iterator[None]:
    """Prefix errors of the `with` block with stage and field, by default the source field of a stage that fetches."""
    config = recipe.stages[name]
    field = field or (config.product if name in recipe.fetched else None)
    where = f"stages.{name}.{field}" if field else f"stages.{name}"
    try:
        yield
    except EvaluationError as error:
        raise EvaluationError(f"{where}: {config.hint_for(recipe.folder) or error}") from error
    except LifecycleError as error:
        raise type(error)(f"{where}: {error}") from error
