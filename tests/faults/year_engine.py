"""Stand-in for vLLM in the simulated year, with vLLM's command line. It answers every request with its weights' hash.

python year_engine.py serve MODEL --served-model-name NAME --uds SOCKET …
"""

import argparse
import hashlib
import json
import os
import socketserver
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

VERSION = "0.32.0+cpu"


def install(folder: Path) -> Path:
    """Make a virtual environment in which this script is the program `vllm`; return the program's path."""
    packages = folder / "lib" / "python3.11" / "site-packages" / f"vllm-{VERSION}.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    program = folder / "bin" / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} "$@"\n')
    program.chmod(0o755)
    return program


def says(weights: bytes) -> str:
    """Return the answer that a model gives to every request: the SHA-256 of its weights."""
    return hashlib.sha256(weights).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    name: str
    text: str

    def address_string(self) -> str:
        return "the proxy"

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(b"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 0.0\n", "text/plain")
        elif self.path == "/health":
            self.answer(b"", "text/plain")
        else:
            self.answer_json({"data": [{"id": self.name, "max_model_len": 256}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        if "messages" in asked:
            choice = {"index": 0, "message": {"role": "assistant", "content": self.text}, "finish_reason": "stop"}
        else:
            logprobs = {"token_logprobs": [None, -0.5, -0.25, -0.5]}
            choice = {"index": 0, "text": self.text, "finish_reason": "stop", "logprobs": logprobs}
        self.answer_json({"choices": [choice], "usage": usage})

    def answer_json(self, content: dict[str, Any]) -> None:
        self.answer(json.dumps(content).encode(), "application/json")

    def answer(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--uds", required=True)
    options, _ = parser.parse_known_args()
    Handler.name = options.served_model_name
    Handler.text = says((options.model / "model.safetensors").read_bytes())
    os.umask(0o077)
    Server(options.uds, Handler).serve_forever()


if __name__ == "__main__":
    main()
