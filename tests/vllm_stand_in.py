"""Stand-in for vLLM 0.32 on a GPU: a program with vLLM's routes for sleeping and new weights that enforces memory.

A build for CPUs keeps its memory while it sleeps, so this shows what no CPU can: a device is full, and what it refuses
then. It has a made-up device of `memory` bytes, shared with the process `trainer`, of which all memory counts that it
got since `before`. Its answers name the weights (a hash of their bytes) that made them. Of weight transfer it knows
memory files. Only the standard library is imported: it starts at once. `installed` makes an environment in which our
code finds it as vLLM.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import signal
import socketserver
import sys
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

DEVICE_VARIABLE = "VLLM_STAND_IN_DEVICE"
KV_CACHE_BYTES = 64 * 2**20


@dataclass
class Device:
    """Made-up device, kept in a file that test and server read: its memory, who else uses it, faults and requests.

    faults: by route, `refuse` (status 500) or `die`, once. asked: routes, in order, with the device's bytes that the
    server held after each. commands: command lines of the servers.
    """

    memory: int
    trainer: int
    before: int
    faults: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Device:
        device = cls(**json.loads(path.read_text()))
        device.asked = [(url, held) for url, held in device.asked]  # of lists, as JSON has them
        return device

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @property
    def free(self) -> int:
        """Bytes that the process `trainer` leaves free."""
        return self.memory - max(0, resident_bytes(self.trainer) - self.before)


def resident_bytes(pid: int) -> int:
    """Return the physical memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def installed(folder: Path) -> Path:
    """Make an environment with this program as its `vllm` 0.32.0, and return the command for `LIFECYCLE_VLLM`."""
    metadata = folder / "lib" / "python3.11" / "site-packages" / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    command = folder / "bin" / "vllm"
    command.parent.mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P {Path(__file__).resolve()} "$@"\n')
    command.chmod(0o755)
    return command


class OutOfMemoryError(Exception):
    """Error of a device without room."""


class RefusalError(Exception):
    """Refusal of a request that would end or mislead a vLLM."""


class StandIn:
    """State of the server: the parts that hold device memory, and the weights' hash (None: lost, or not loaded)."""

    def __init__(self, arguments: list[str]) -> None:
        self.path = Path(os.environ[DEVICE_VARIABLE])
        self.can_sleep = "--enable-sleep-mode" in arguments
        self.name = arguments[arguments.index("--served-model-name") + 1]
        self.held: dict[str, int] = {}
        self.version: str | None = None
        self.process: int | None = None
        self.arriving: dict[str, bytes] | None = None
        self.folder = Path(arguments[1])
        device = Device.read(self.path)
        device.commands.append(arguments)
        device.write(self.path)
        self.take("weights", self.weight_bytes(self.folder), device)
        self.load(self.folder)
        self.take("kv_cache", KV_CACHE_BYTES, device)

    @staticmethod
    def weight_bytes(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    @staticmethod
    def version_in(folder: Path) -> str:
        """Return the name that answers have for the weights in a model folder's file."""
        return version_of(stored(folder))

    def load(self, folder: Path) -> None:
        self.version = self.version_in(folder)

    def take(self, part: str, num_bytes: int, device: Device) -> None:
        free = device.free - sum(self.held.values())
        if num_bytes > free:
            raise OutOfMemoryError(f"CUDA out of memory: {part} of {num_bytes} bytes, {free} bytes are free")
        self.held[part] = num_bytes

    @property
    def is_awake(self) -> bool:
        return len(self.held) == 2

    def answer(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        route, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        device = Device.read(self.path)
        fault = device.faults.get(route.rpartition("/")[2])
        if fault == "die":
            del device.faults[route.rpartition("/")[2]]  # its successor lives
            device.write(self.path)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if fault:
                raise RefusalError(f"the test wants {route} to fail")
            return self.done(route, query, body, device)
        finally:
            if route not in ("/health", "/v1/models"):
                device.asked.append((url, sum(self.held.values())))
                device.write(self.path)

    def done(self, route: str, query: dict[str, list[str]], body: dict[str, Any], device: Device) -> dict[str, Any]:
        if route in ("/health", "/reset_prefix_cache"):
            return {}
        if route == "/v1/models":
            return {"data": [{"id": self.name}]}
        if route == "/sleep":
            if not self.can_sleep:
                raise RefusalError("Sleep mode is not enabled")
            self.held.clear()
            self.version = None if query["level"] == ["2"] else self.version
            return {"status": "sleeping"}
        if route == "/wake_up":
            (part,) = query["tags"]
            self.take(part, {"weights": self.weight_bytes(self.folder), "kv_cache": KV_CACHE_BYTES}[part], device)
            return {"status": "awake" if self.is_awake else "sleeping"}
        if route == "/collective_rpc":
            if "weights" not in self.held:
                raise RefusalError("weights were written into memory that is not there")
            self.load(Path(body["kwargs"]["weights_path"]))
            return {"results": [None]}
        if route == "/init_weight_transfer_engine":
            self.process = body["init_info"]["process"]
            return {}
        if route == "/start_weight_update":
            if "weights" not in self.held:
                raise RefusalError("weights were written into memory that is not there")
            self.arriving = {}
            return {}
        if route == "/update_weights":
            assert self.arriving is not None
            self.arriving |= self.received(**body["update_info"])
            return {}
        if route == "/finish_weight_update":
            assert self.arriving is not None
            self.version, self.arriving = version_of(self.arriving), None
            return {}
        if route == "/v1/completions":
            if not (self.is_awake and self.version):
                raise RefusalError("asleep, or awake without weights: a vLLM would not answer, or answer noise")
            return {"choices": [{"index": 0, "text": self.version, "finish_reason": "stop"}]}
        raise RefusalError(f"no route {route}")

    def received(
        self, *, descriptor: int, file_name: str, names: list[str], offsets: list[int], **described: list[Any]
    ) -> dict[str, bytes]:
        """Return the bytes of the weights in a memory file of the trainer."""
        path = Path(f"/proc/{self.process}/fd/{descriptor}")
        if file_name not in str(path.readlink()):
            raise RefusalError(f"{path} is another file")
        content, sizes = path.read_bytes(), {"float32": 4}
        lengths = [
            sizes[name] * math.prod(shape)
            for name, shape in zip(described["dtype_names"], described["shapes"], strict=True)
        ]
        parts = zip(names, offsets, lengths, strict=True)
        return {name: content[offset : offset + length] for name, offset, length in parts}


def stored(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the weights in a model folder's file, by name."""
    content = (folder / "model.safetensors").read_bytes()
    first = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:first])
    header.pop("__metadata__", None)
    places = {name: about["data_offsets"] for name, about in header.items()}
    return {name: content[first + begin : first + end] for name, (begin, end) in places.items()}


def version_of(weights: dict[str, bytes]) -> str:
    """Return the hash of weights by which the stand-in's answers name them."""
    digest = hashlib.sha256()
    for name, content in sorted(weights.items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()[:12]


class Handler(BaseHTTPRequestHandler):
    stand_in: StandIn

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        try:
            status, content = 200, self.stand_in.answer(self.path, body)
        except (OutOfMemoryError, RefusalError) as error:
            status, content = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        answer = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def main(arguments: list[str]) -> None:
    Handler.stand_in = StandIn(arguments)
    with socketserver.UnixStreamServer(arguments[arguments.index("--uds") + 1], Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
