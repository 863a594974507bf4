"""Container images of `deploy/docker`, built and entered without a Docker daemon or a registry of images.

buildah runs each step in a chroot. Python's image, from which ours start, is made of Debian's packages. Needs root and
what `make buildah` installs.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON_IMAGE = "docker.io/library/python:3.11-slim-bookworm"
MIRROR = "http://deb.debian.org/debian"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
NAMES = ("pipeline", "serve", "all")


class Builder:
    """Images and containers in a folder of their own, which nothing outlives. The folder needs 20 GB."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buildah = [
            "buildah",
            f"--root={folder / 'images'}",
            f"--runroot={folder / 'running'}",
        ]

    def make_python_image(self) -> None:
        """Make Python's image of Debian's packages, which trusts the certificates that this machine trusts."""
        tree = self._folder / "python"
        packages = "--include=python3,python3-venv,python3-pip,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", tree, _mirror()], check=True)
        (tree / "usr" / "bin" / "python").symlink_to("python3")
        for marker in (tree / "usr" / "lib").glob("python3*/EXTERNALLY-MANAGED"):
            marker.unlink()  # Debian's pip installs nothing beside it, as that of Python's image does
        shutil.copyfile(CERTIFICATES, tree / CERTIFICATES.lstrip("/"))
        container = self._ask("from", "scratch")
        self._run("copy", container, tree, "/")
        self._run("config", f"--env=SSL_CERT_FILE={CERTIFICATES}", f"--env=PIP_CERT={CERTIFICATES}", container)
        self._run("commit", "--rm", container, PYTHON_IMAGE)
        shutil.rmtree(tree)

    def build(self, name: str) -> None:
        """Build an image of `deploy/docker` for CPUs from this checkout, as its file says."""
        arguments = {"TRANSFORMER_ENGINE": "no", "DEVICE": "cpu"}
        if wheels := os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS"):
            arguments["UV_FIND_LINKS"] = wheels
        arguments |= {one.upper(): f"localhost/llm-lifecycle-{one}" for one in NAMES if name == "all"}
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        mounted = [f"--volume={wheels}:{wheels}:ro"] if wheels else []
        place = [f"--file=deploy/docker/{name}.Dockerfile", f"--tag=llm-lifecycle-{name}", "."]
        self._run("bud", "--isolation=chroot", "--network=host", "--pull-never", *mounted, *given, *place)

    @contextmanager
    def container(self, name: str) -> Iterator["Container"]:
        """Make a container of an image, until the `with` block ends."""
        container = self._ask("from", "--pull-never", f"localhost/llm-lifecycle-{name}")
        try:
            yield Container([*self._buildah, "run", "--isolation=chroot", "--no-hosts"], container)
        finally:
            self._run("rm", container)

    def describe(self, name: str) -> dict[str, str | int]:
        """Return the size of an image in bytes and the digest of its contents."""
        (found,) = json.loads(self._ask("images", "--json", f"localhost/llm-lifecycle-{name}"))
        return {"size": found["size"], "digest": found["digest"]}

    def remove(self) -> None:
        self._run("rm", "--all")
        self._run("rmi", "--all", "--force")
        shutil.rmtree(self._folder)

    def _ask(self, *words: str) -> str:
        return subprocess.run([*self._buildah, *words], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    def _run(self, *words: str | Path) -> None:
        subprocess.run([*self._buildah, *words], cwd=ROOT, check=True)


class Container:
    """Container in which commands run as the image's own user."""

    def __init__(self, run: Sequence[str], name: str) -> None:
        self._run, self._name = run, name

    def command(
        self,
        *words: str,
        environment: dict[str, str] | None = None,
        volumes: dict[Path, str] | None = None,
        user: str | None = None,
    ) -> list[str]:
        """Return the command that runs `words` in the container. volumes: where a path of this machine is there."""
        options = [f"--env={name}={value}" for name, value in (environment or {}).items()]
        options += [f"--volume={path}:{place}" for path, place in (volumes or {}).items()]
        options += [f"--user={user}"] if user else []
        return [*self._run, *options, self._name, "--", *words]


def _mirror() -> str:
    """Return the address from which this machine installs Debian's packages."""
    for source in Path("/etc/apt/sources.list.d").glob("*.sources"):
        for line in source.read_text().splitlines():
            if line.startswith("URIs:"):
                return line.split()[1]
    return MIRROR
