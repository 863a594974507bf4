"""Server with OpenAI's API that answers with sums of numbers: the program of the tests' tiny engine.

Run: `tiny_openai_server.py MODEL_FOLDER NAME HOST PORT`, with the API key in TINY_KEY.
It answers `What is 1 + 2?` with `3`, and everything else with `?`; in a chat, with the sum of all
that was said. Like a real engine it refuses a model that it cannot load, with the reason in its log: one whose folder
has a file `broken`; with one that has a file `deadly`, it dies of the first request. A file `slow` holds the seconds
that it takes over each part of an answer to a chat; a file `gate` the path of a file without which it starts. Of those
that share a file TINY_STARTING, one that starts while another does refuses to.
"""

import fcntl
import json
import os
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tokenizers import Tokenizer

folder, name, host, port = sys.argv[1:]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer({})
        elif self.allowed():
            self.answer({"data": [{"id": name, "context": 64}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        if (Path(folder) / "deadly").exists():
            print("tiny: cannot run the model: it has a file `deadly`", flush=True)
            os._exit(1)
        if "messages" in asked and asked.get("stream"):
            self.chat(asked)
            return
        if "messages" in asked:
            take_time()
            numbers = re.findall(r"\d+", asked["messages"][-1]["content"])
            message = {"role": "assistant", "content": str(sum(map(int, numbers)))}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            self.answer({"id": "1", "created": 1, "model": name, "choices": [choice], "usage": usage})
            return
        prompt = asked["prompt"]
        if isinstance(prompt, list):  # of token ids
            prompt = Tokenizer.from_file(str(Path(folder) / "tokenizer.json")).decode(prompt)
        numbers = re.findall(r"\d+", prompt)
        text = str(sum(map(int, numbers))) if "+" in prompt else "?"
        choice = {"text": text, "finish_reason": "stop", "logprobs": {"token_logprobs": [None, -0.5, -0.25]}}
        self.answer({"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(text)}})

    def chat(self, asked: dict) -> None:
        """Stream the sum of all numbers in a conversation; answer with HTTP 400 if the last message has no number.

        The answer has colour if the last message contains `red`, and the sampling options if it contains `by`.
        """
        messages = asked["messages"]
        if not re.search(r"\d", messages[-1]["content"]):
            self.send_error(400, "no number")
            return
        numbers = [int(number) for message in messages for number in re.findall(r"\d+", message["content"])]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        colour = ["\x1b[31m\x9b"] if "red" in messages[-1]["content"] else []
        sampling = [f" by {name} {asked[name]}" for name in ("temperature", "top_p", "max_tokens") if name in asked]
        by = sampling if "by" in messages[-1]["content"] else []
        for part in (*colour, "it is ", str(sum(numbers)), *by):
            take_time()
            self.event(json.dumps({"choices": [{"delta": {"content": part}}]}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

    def allowed(self) -> bool:
        right = self.headers["Authorization"] == f"Bearer {os.environ['TINY_KEY']}"
        if not right:
            self.send_error(401)
        return right

    def answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def take_time() -> None:
    slow = Path(folder) / "slow"
    time.sleep(float(slow.read_text()) if slow.exists() else 0)


print("loading the model", flush=True)
with Path(os.environ.get("TINY_STARTING", __file__)).open() as starting:
    try:
        fcntl.flock(starting, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if "TINY_STARTING" in os.environ:
            sys.exit("tiny: another one is starting")
    gate = Path(folder) / "gate"
    while gate.exists() and Path(gate.read_text()).exists():
        time.sleep(0.02)
    if (Path(folder) / "broken").exists():
        sys.exit("tiny: cannot load the model: it has a file `broken`")
    server = ThreadingHTTPServer((host, int(port)), Handler)
server.serve_forever()
