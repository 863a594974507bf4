"""Upgrade: the newest versions of all requirements that resolve together, what holds others back, and what they break.

    python tests/upgrade.py             resolve, build scratch environments, prove, write build/upgrade/report.md
    python tests/upgrade.py --resolve   resolve only
    python tests/upgrade.py --without NAME   leave a requirement out that holds others back
    python tests/upgrade.py --apply     afterwards also write the found versions into deploy/requirements/*.in

`make upgrade` runs it. Bounds are lifted: a bound that is there because something broke shows in the proofs whether it
still does. Nothing falls back: a requirement keeps at least its pinned version. What is named as holding a package back
is the resolver's own answer to that package's newest version beside the newest of all others. Packages with a wheel in
the folder of wheels in UV_FIND_LINKS (a CPU build of torch) keep their bounds: their builds come from there alone.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "deploy" / "requirements"
SCRATCH = ROOT / "build" / "upgrade"
PYTHON = "3.11"
CAUSE = "cause: "
MOST_EXPLAINED = 300
"""Length in characters from which on no earlier sentence of a resolver's explanation is shown."""
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)
FAMILY = re.compile(r"\[(?P<family>[a-z0-9_]+)-(?P<column>.+)\]$")
"""Pattern of the ids of the zoo's tests, which name a family and a column of the table of families."""


@dataclass(frozen=True)
class Environment:
    """Environment with requirements of its own: those in `NAME.in`, pinned in `NAME.txt`."""

    name: str
    over: tuple[str, ...] = ()
    """Names of the environments into which this one is installed, so that their versions hold here."""
    overrides: str | None = None
    """File that takes dependencies out of the resolution."""
    is_elsewhere: bool = False
    """True if its platform is another machine's: it is resolved, and not installed."""


ENVIRONMENTS = (
    Environment("pipeline"),
    Environment("media", over=("pipeline",)),
    Environment("shared-store", over=("pipeline",)),
    Environment("test", over=("pipeline", "media", "shared-store")),
    Environment("serve-cpu", overrides="serve-cpu-overrides.txt"),
    Environment("serve-cuda", is_elsewhere=True),
    Environment("evalscope"),
    Environment("bfcl", overrides="bfcl-overrides.txt"),
    Environment("llama-cpp"),
    Environment("reasoning-gym"),
)


LOCAL = {
    "pipeline": ("deploy/torchvision-without-cuda",),
    "serve-cpu": ("deploy/torchvision-without-cuda", "deploy/vllm-metadata"),
}
"""Our own packages that the Makefile installs beside a CPU build of torch, by environment."""


@dataclass(frozen=True)
class Proof:
    """Run of pytest in the scratch environment."""

    name: str
    arguments: tuple[str, ...]


PROOFS = (
    Proof("zoo", ("-m", "nightly", "tests/zoo")),
    Proof("oracles", ("tests/unit/stages/engines", "tests/unit/stages/models", "tests/unit/stages/adapters")),
    Proof("quickstart", ("tests/pipeline/test_quickstart.py", "tests/pipeline/test_schedule.py")),
)


@dataclass
class Resolution:
    """Versions of an environment's own requirements, by name."""

    environment: str
    pinned: dict[str, str]
    together: dict[str, str] = field(default_factory=dict)
    """Newest that resolve together; empty where nothing does."""
    newest: dict[str, str] = field(default_factory=dict)
    """Newest that the registry has for this Python, whatever else they need."""
    held: dict[str, str] = field(default_factory=dict)
    """Resolver's reason why the newest version of a package does not go with the others, by name."""
    problem: str | None = None
    all_pins: str = ""
    """Requirements file of everything that resolves together."""

    @property
    def is_of_cpu(self) -> bool:
        """Return whether torch is a build for CPUs alone."""
        return bool(re.search(r"^torch==\S+\+cpu", self.all_pins, re.MULTILINE))


def main(arguments: Sequence[str]) -> int:
    """Resolve, prove and report as the arguments say; return 1 if a proof failed or nothing resolved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--resolve", action="store_true", help="only resolve, install and prove nothing")
    parser.add_argument("--apply", action="store_true", help="write the found versions into deploy/requirements/*.in")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="leave a requirement out")
    chosen = parser.parse_args(arguments)
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    resolutions = resolve_all(REQUIREMENTS, SCRATCH, without=chosen.without)
    report = SCRATCH / "report.md"
    report.write_text(described(resolutions))
    broken: dict[str, list[str]] = {}
    if not chosen.resolve:
        broken = proved(SCRATCH, resolutions)
        report.write_text(described(resolutions, broken))
    print(f"{report.read_text()}\nwritten to {report}")
    if chosen.apply:
        for resolution in resolutions:
            write_bounds(REQUIREMENTS / f"{resolution.environment}.in", resolution.together)
        print("wrote deploy/requirements/*.in: read the change, then `make lock`")
    return 1 if any(broken.values()) or any(one.problem for one in resolutions) else 0


def resolve_all(
    folder: Path, scratch: Path, environments: Iterable[Environment] = ENVIRONMENTS, without: Iterable[str] = ()
) -> list[Resolution]:
    """Resolve each environment of a requirements folder in a scratch copy, in order.

    without: names of requirements that are left out, so that others are no longer held back by them.
    """
    copies, left_out = scratch / "requirements", {canonicalize_name(name) for name in without}
    shutil.copytree(folder, copies, dirs_exist_ok=True)
    return [_resolved(copies, environment, left_out) for environment in environments]


def requirements_of(file: Path) -> list[Requirement]:
    """Return the requirements in a file, without its comments and options."""
    lines = (line.split(" #")[0].strip() for line in file.read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]


def pins_of(file: Path) -> dict[str, str]:
    """Return the versions in a file of pins, by normalized name, without local parts such as `+cpu`."""
    return _pins(file.read_text()) if file.is_file() else {}


def _pins(text: str) -> dict[str, str]:
    return {canonicalize_name(name): version.partition("+")[0] for name, version in PIN.findall(text)}


def _resolved(folder: Path, environment: Environment, left_out: Set[str]) -> Resolution:
    named = requirements_of(folder / f"{environment.name}.in")
    own = [one for one in named if canonicalize_name(one.name) not in left_out]
    pins = pins_of(folder / f"{environment.name}.txt")
    names = [canonicalize_name(one.name) for one in own]
    resolution = Resolution(environment.name, {name: pins[name] for name in names if name in pins})
    kept = _names_in_folders_of_wheels()
    options = _options(folder, environment)
    resolution.newest = _pins(_answer((_with(one, "") for one in own), ["--no-deps"]).stdout)
    # At least what is pinned: a resolver asked for anything newer falls back to years-old releases of something else.
    # At most the newest release: it would take an alpha that lifts a bound.
    loosened = {
        name: str(one) if name in kept else _with(one, _between(pins.get(name), resolution.newest.get(name)))
        for name, one in zip(names, own, strict=True)
    }
    answer = _answer(loosened.values(), options)
    if answer.returncode:
        resolution.problem = _cause(answer.stderr)
        return resolution
    resolution.all_pins = answer.stdout
    found = _pins(answer.stdout)
    resolution.together = {name: found[name] for name in names if name in found}
    (folder / f"{environment.name}.txt").write_text(answer.stdout)
    by_name = dict(zip(names, own, strict=True))
    for name, version in resolution.newest.items():
        if Version(version) <= Version(resolution.together.get(name, version)):
            continue
        if name in kept:
            resolution.held[name] = f"{by_name[name]} stands, since its builds come from a folder of wheels"
            continue
        others = {other: _with(by_name[other], f"=={newest}") for other, newest in resolution.together.items()}
        asked = [*{**others, name: _with(by_name[name], f"=={version}")}.values()]
        refused = _answer(asked, options)
        resolution.held[name] = _cause(refused.stderr) if refused.returncode else "resolves if asked for by its version"
    return resolution


def _with(requirement: Requirement, specifier: str) -> str:
    """Return a requirement as text, with another version specifier."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}{extras}{specifier}{marker}"


def _between(least: str | None, most: str | None) -> str:
    """Return a version specifier with these bounds, both included."""
    return ",".join(filter(None, [least and f">={least}", most and f"<={most}"]))


def _options(folder: Path, environment: Environment) -> list[str]:
    options = [option for name in environment.over for option in ("--constraints", str(folder / f"{name}.txt"))]
    options += ["--override", str(folder / environment.overrides)] if environment.overrides else []
    return [*options, *(["--python-platform", "x86_64-manylinux_2_28"] if environment.is_elsewhere else [])]


def _answer(requirements: Iterable[str], options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Return what the resolver says of requirements: pins on stdout, or why there are none on stderr."""
    command = [uv(), "pip", "compile", "--quiet", "--python-version", PYTHON]
    # Colours and wrapped lines would cut the sentences that are read.
    environment = {**os.environ, "NO_COLOR": "1", "UV_NO_WRAP": "1"}
    text = "\n".join(requirements)
    return subprocess.run(
        [*command, "--no-header", "--no-annotate", *options, "-"],
        input=text,
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )


def _cause(stderr: str) -> str:
    """Return the end of the resolver's explanation, which has the conclusion, in one line and without hints."""
    _, _, explained = stderr.partition(CAUSE)
    sentences = " ".join((explained or stderr).partition("hint:")[0].split()).split(". ")
    kept = sentences[-1:]
    while len(kept) < len(sentences) and len(". ".join(kept)) < MOST_EXPLAINED:
        kept = sentences[-len(kept) - 1 :]
    return ". ".join(kept)


def uv() -> str:
    """Return the path of uv, beside this Python or on PATH."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else "uv"


def _names_in_folders_of_wheels() -> set[str]:
    """Return the names of packages with a wheel in a folder that uv finds links in."""
    folders = [Path(one) for one in re.split(r"[,\s]+", os.environ.get("UV_FIND_LINKS", "")) if one]
    wheels = [wheel for folder in folders if folder.is_dir() for wheel in folder.glob("*.whl")]
    return {canonicalize_name(wheel.name.split("-")[0]) for wheel in wheels}


def install(scratch: Path, resolutions: Sequence[Resolution]) -> Path:
    """Install what resolves into scratch environments beside each other; return the pipeline's Python."""
    found = {one.environment: one for one in resolutions}
    python = _environment(scratch / ".venv", [found[name] for name in ("pipeline", "media", "test") if name in found])
    beside = (
        ("serve-cpu", ".venv-serve"),
        ("llama-cpp", ".venv-llama-cpp"),
        ("reasoning-gym", ".venv-reasoning-gym"),
    )
    for name, folder in beside:
        if name not in found or not (ROOT / folder).exists():
            continue
        if found[name].together == found[name].pinned:
            (scratch / folder).symlink_to((ROOT / folder).resolve())
        else:
            _environment(scratch / folder, [found[name]])
    return python


def _environment(folder: Path, resolutions: Iterable[Resolution]) -> Path:
    """Make an environment of all that resolved, and of our own packages that it has (`LOCAL`); return its Python."""
    python = folder / "bin" / "python"
    subprocess.run([uv(), "venv", "--quiet", "--python", sys.executable, folder], check=True)
    packages: list[str] = []
    for resolution in resolutions:
        file = folder.with_name(f"{folder.name}-{resolution.environment}.txt")
        file.write_text(resolution.all_pins)
        packages += ["--requirement", str(file)]
        packages += [f"{ROOT / one}" for one in LOCAL.get(resolution.environment, ()) if resolution.is_of_cpu]
    # Without dependencies: the files hold all, and what overrides take out stays out.
    subprocess.run([uv(), "pip", "install", "--quiet", "--no-deps", "--python", python, *packages], check=True)
    return python


def proved(scratch: Path, resolutions: Sequence[Resolution], proofs: Sequence[Proof] = PROOFS) -> dict[str, list[str]]:
    """Install scratch environments and run the proofs there; return the ids of the tests that failed, by proof."""
    python = install(scratch, resolutions)
    subprocess.run([uv(), "pip", "install", "--quiet", "--no-deps", "--python", python, "--editable", ROOT], check=True)
    environment = {**os.environ, "LIFECYCLE_HOME": str(scratch / "home")}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    broken: dict[str, list[str]] = {}
    for proof in proofs:
        results = scratch / f"{proof.name}.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
        subprocess.run([*command, *proof.arguments], cwd=ROOT, env=environment, check=False)
        broken[proof.name] = failures(results)
    return broken


def failures(results: Path) -> list[str]:
    """Return the ids of the tests that failed, from pytest's results; a run that wrote none counts as one failure."""
    if not results.is_file():
        return [f"{results.stem}: pytest wrote no results"]
    cases = ElementTree.parse(results).iter("testcase")
    return [
        f"{case.get('classname')}::{case.get('name')}: {_first_line(problem)}"
        for case in cases
        if (problem := next((one for one in case if one.tag in ("failure", "error")), None)) is not None
    ]


def _first_line(problem: ElementTree.Element) -> str:
    return (problem.get("message") or "").strip().partition("\n")[0][:300]


def by_family(broken: Iterable[str]) -> dict[str, list[str]]:
    """Return failed tests by the model family in their ids, as the zoo's have; others under "other tests"."""
    families: dict[str, list[str]] = defaultdict(list)
    for line in broken:
        test, _, message = line.partition(": ")
        match = FAMILY.search(test)
        families[match["family"] if match else "other tests"].append(f"{match['column'] if match else test}: {message}")
    return dict(families)


def described(resolutions: Iterable[Resolution], broken: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the report as Markdown: versions, what holds packages back, and, after proofs, what broke by family."""
    lines = ["# Upgrade", ""]
    for one in resolutions:
        lines += [f"## {one.environment}", ""]
        if one.problem:
            lines += [f"Nothing resolves: {one.problem}", ""]
            continue
        changed = {name: now for name, now in one.together.items() if now != one.pinned.get(name)}
        lines += [f"- {name}: {one.pinned.get(name, 'not pinned')} → {version}" for name, version in changed.items()]
        lines += [
            f"- {name} stays at {one.together.get(name)}; {one.newest[name]} exists: {reason}"
            for name, reason in one.held.items()
        ]
        newest = [
            f"{name} {now}" for name, now in one.together.items() if now == one.newest.get(name) and name not in changed
        ]
        lines += [f"Already the newest: {', '.join(newest)}."] if newest else []
        lines += [""]
    for name, failed in (broken or {}).items():
        lines += [f"## {name}", "", *([] if failed else ["Everything passed."])]
        lines += [f"- {family}: {'; '.join(problems)}" for family, problems in by_family(failed).items()]
        lines += [""]
    return "\n".join(lines)


def write_bounds(file: Path, versions: Mapping[str, str]) -> None:
    """Write versions into a requirements file: exact pins get the new one, bounds that exclude it are moved above it.

    Other lines, comments and bounds that allow the version stay.
    """
    lines = []
    for line in file.read_text().splitlines():
        code, separator, comment = line.partition(" #")
        if code.strip() and not code.startswith(("#", "-")):
            requirement = Requirement(code.strip())
            version = versions.get(canonicalize_name(requirement.name))
            if version and not requirement.specifier.contains(version):
                is_exact = any(one.operator == "==" for one in requirement.specifier)
                line = _with(requirement, f"=={version}" if is_exact else f">={version},<{_after(version)}")
                line += f"{separator}{comment}"
        lines.append(line)
    file.write_text("\n".join(lines) + "\n")


def _after(version: str) -> str:
    """Return the minor release after a version's, as an upper bound."""
    parsed = Version(version)
    return f"{parsed.major}.{parsed.minor + 1}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
