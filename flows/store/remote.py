"""Shared store in object storage, beside the local one: contents by their sha256, records that list them, champions.

    blobs/<sha256>                  content of a file
    records/<kind>/<version>.json   an artifact; written last, and only if no other home wrote it meanwhile
    leases/<kind>-<version>         who builds it now (`flows/store/lease.py`)
    champions/<name>.json           the champion of a registered model
    ledgers/<refresh>/              how artifacts were made (`flows/store/ledgers.py`)
    jobs/<job>/                     cluster jobs away from their home's disk (`flows/launch/through_bucket.py`)

<home>/store.yaml:

    store: s3://BUCKET/PREFIX

The local store stays the working copy: an artifact is received whole, each file compared with its sha256, or not at
all. Nothing that comes from the bucket is trusted: names and digests of a record are checked before a file is written.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import ValidationError

from flows.recipe.text import parse_yaml, read_text
from flows.recipe.version import version_of
from flows.store.content import NOT_OF_THE_ARTIFACT, FileEntry, Files, content_digest, hash_file
from flows.store.objects import ADDRESS, Held, Listed, Objects, go_on
from flows.store.record import Artifact, Record
from stages.core.contract import StageConfig
from stages.core.errors import DownloadError, RecipeError, StoreError, full_disk_named
from stages.core.fields import StrictModel
from stages.core.redaction import quoted, redact, secrets_in
from stages.hubs.listing import check_fit, path_in

SETTING_FILE = "store.yaml"
NUM_CONNECTIONS = 8
SHA256 = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHARED_LEDGERS, SHARED_JOBS = "ledgers", "jobs"
RECORD_NAME = re.compile(rf"records/({NAME.pattern})/({NAME.pattern})\.json")
FRESH = timedelta(days=1)
"""Age up to which a blob that is there is not sent again; garbage collection takes none of less than twice this age."""


class Setting(StrictModel):
    """Contents of `store.yaml`: the address of the shared store."""

    store: str


@dataclass(frozen=True)
class Shared:
    """Record of an artifact in the shared store, and the object that it was read from."""

    record: Record
    held: Held


def read_setting(file: Path) -> str | None:
    """Return the address of a home's shared store; None without the setting. Raises RecipeError for a wrong one."""
    if not file.exists():
        return None
    tree = parse_yaml(read_text(file, "the setting of the store"))
    try:
        address = Setting.model_validate(tree).store
    except ValidationError:
        raise RecipeError(f"{file}: expected one field, `store: s3://BUCKET/PREFIX` (or gs, az)") from None
    if not ADDRESS.fullmatch(address):
        raise RecipeError(
            f"{file}: store: found {quoted(address, 60)}; expected s3://BUCKET/PREFIX, gs://… or az://…, without "
            "credentials: these come from the environment"
        )
    return address.rstrip("/")


def job_store(stage: str, config: StageConfig, home: Path) -> str | None:
    """Return the shared store through which a job's files pass; None for a stage whose processes see the home's disk.

    Raises RecipeError for a home that names no store, and for a secret in the environment, which would lie there.
    """
    execution = config.execution
    if execution.options.shares_home:
        return None
    path, address = f"stages.{stage}.execution", read_setting(home / SETTING_FILE)
    if address is None:
        raise RecipeError(
            f"{path}.{execution.launcher}.store_claim: null: its job shares no volume with this home, so its files "
            f"pass through a bucket; name one in {home / SETTING_FILE}, or a volume in store_claim"
        )
    text = "\n".join(execution.environment.values())
    if secrets_in(execution.environment) or redact(text, ()) != text:
        raise RecipeError(
            f"{path}.environment holds a secret, which would lie in {address}; name it in "
            f"execution.{execution.launcher}.secrets instead"
        )
    return address


class Remote:
    """Shared store at an address. Raises what `Objects` raises, StoreError for what no home can have written."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.objects = Objects(address)

    def find(self, kind: str, version: str) -> Shared | None:
        """Return the record of an artifact; None when the shared store has none."""
        held = self.objects.read(_record_name(kind, version))
        return Shared(self._checked(held.content, kind, version), held) if held else None

    def records(self) -> Iterator[tuple[Shared | StoreError, Listed]]:
        """Yield the records of all artifacts, each with the time of its writing, or why it is none."""
        for listed in self.objects.below("records"):
            named = RECORD_NAME.fullmatch(listed.name)
            try:
                if not named:
                    raise StoreError(f"{self.address}/{listed.name} is no record of an artifact; delete this object")
                if found := self.find(*named.groups()):
                    yield found, listed
            except StoreError as error:
                yield error, listed

    def send(self, artifact: Artifact, seen: Shared | None, check: Callable[[], None] = go_on) -> bool:
        """Send an artifact, its contents first; return False, without a record, if another home was faster.

        seen: the record that it replaces, which must still be there. check: is called every 0.2 s, and may raise.
        Raises StoreError for a file that is no longer as recorded.
        """
        record = artifact.record
        self.send_files(record.files, artifact.folder, check)
        content = record.model_dump_json().encode()
        return bool(self.objects.swap(_record_name(record.kind, record.version), content, seen.held if seen else None))

    def send_files(self, files: Files, folder: Path, check: Callable[[], None]) -> None:
        """Send the contents of a folder's files. Raises StoreError for one that is no longer as listed."""
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            for _ in pool.map(lambda name: self._send(files[name], folder / name, check), files):
                pass

    def receive(self, files: Files, folder: Path, check: Callable[[], None] = go_on) -> None:
        """Receive files into a folder, which may hold some of them from an earlier try.

        check: is called every 0.2 s, and may raise. Raises StoreError for a content that is missing or has another
        sha256 than recorded; it is not kept.
        """
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            for _ in pool.map(
                lambda name: self._receive(files[name], path_in(folder, name, self.address), check), files
            ):
                pass

    def _send(self, entry: FileEntry, file: Path, check: Callable[[], None]) -> None:
        check()
        if not entry["size"]:
            return  # nothing to hold
        blob = blob_name(entry["sha256"])
        there = self.objects.written(blob, check)
        if there and there.size_bytes == entry["size"] and datetime.now(UTC) - there.written < FRESH:
            return
        try:
            found = hash_file(file)
        except OSError as error:
            raise StoreError(f"sending {file} to {self.address}: {error.strerror}") from None
        if found != entry:
            raise StoreError(
                f"sending {file} to {self.address}: it is no longer as it was recorded; build its stage again with "
                "`--force`"
            )
        self.objects.send(blob, file, check)

    def _receive(self, entry: FileEntry, target: Path, check: Callable[[], None]) -> None:
        check()
        if target.exists() and hash_file(target) == entry:
            return
        hasher = hashlib.sha256()
        target.parent.mkdir(parents=True, exist_ok=True)
        blob = blob_name(entry["sha256"])
        listed = self.objects.written(blob, check) if entry["size"] else None
        is_other = listed is not None and listed.size_bytes != entry["size"]
        if not is_other:
            with full_disk_named(f"receiving {target.name} from {self.address}", target), target.open("wb") as stream:

                def take(chunk: bytes) -> None:
                    stream.write(chunk)
                    hasher.update(chunk)

                self.objects.receive(blob, entry["size"], take, check)
            is_other = hasher.hexdigest() != entry["sha256"]
        if is_other:
            target.unlink(missing_ok=True)
            raise StoreError(
                f"{self.address}/{blob} has other bytes than its name says; nothing of it was kept. Delete this "
                "object, and build the artifact again with `--force`"
            )

    def _checked(self, content: bytes, kind: str, version: str) -> Record:
        where = f"{self.address}/{_record_name(kind, version)}"
        try:
            record = Record.model_validate_json(content)
        except ValidationError:
            raise StoreError(
                f"{where} is no record that this version can read: it is damaged (then delete this object), or of a "
                "newer version of this program, which all homes of a shared store should have"
            ) from None
        sound = (
            (record.kind, record.version) == (kind, version)
            and NAME.fullmatch(record.stage)
            and version_of(record.identity) == version
            and all(SHA256.fullmatch(entry["sha256"]) and entry["size"] >= 0 for entry in record.files.values())
            and not any(name.split("/")[0] in NOT_OF_THE_ARTIFACT for name in record.files)
            and record.digest == content_digest(record.product, record.files)
        )
        if not sound:
            raise StoreError(f"{where} contradicts itself, or names what no artifact has; nothing of it is taken")
        try:
            check_fit(record.files, where)
            for name in record.files:
                path_in(Path("/nowhere"), name, where)
        except DownloadError as error:
            raise StoreError(str(error)) from None
        return record


def _record_name(kind: str, version: str) -> str:
    for part in (kind, version):
        if not NAME.fullmatch(part):
            raise StoreError(f"{quoted(part, 60)} is no name of an artifact's kind or version")
    return f"records/{kind}/{version}.json"


def lease_name(kind: str, version: str) -> str:
    """Return the name of the lease under which an artifact is built."""
    return f"leases/{kind}-{version}"


def blob_name(sha256: str) -> str:
    """Return the name of the object that holds a content, by its digest alone."""
    return f"blobs/{sha256}"
