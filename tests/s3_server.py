"""S3 server for tests (moto on the loopback), and the environment variables that direct object storage to it."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "lake"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key-of-the-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_CONFIG_FILE": "/dev/null",
}


class Throttle:
    """WSGI application before another one, which answers so many requests with `503 SlowDown`; `count` so far."""

    def __init__(self, app: Any, requests: int) -> None:
        self.app, self.count, self._requests = app, 0, requests

    def __call__(self, environ: Any, start_response: Any) -> Any:
        if self.count >= self._requests:
            return self.app(environ, start_response)
        self.count += 1
        start_response("503 Slow Down", [("Content-Type", "application/xml")])
        return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]


class ObjectServer(ABC):
    """Object storage for tests behind a WSGI server of this process, which may throttle, delay or refuse requests."""

    scheme: str

    def __init__(self, wsgi: Any) -> None:
        self.wsgi = wsgi

    @abstractmethod
    def objects(self) -> dict[str, bytes]:
        """Return the contents of all objects, by key."""

    @abstractmethod
    def delete(self, key: str) -> None: ...

    def empty(self) -> None:
        for key in self.objects():
            self.delete(key)

    @contextmanager
    def throttled(self, requests: int) -> Iterator["Throttle"]:
        """Answer that many requests with `503 SlowDown`."""
        throttle = Throttle(self.wsgi.app, requests)
        with self._answering(throttle):
            yield throttle

    @contextmanager
    def slow(self, part: str, seconds: float) -> Iterator[threading.Event]:
        """Answer requests whose path has this part only after so many seconds, or at the end of the context.

        Yield an event that is set when the first of them has come.
        """
        app, has_come, is_over = self.wsgi.app, threading.Event(), threading.Event()

        def answer(environ: Any, start_response: Any) -> Any:
            if part in environ["PATH_INFO"]:
                has_come.set()
                is_over.wait(seconds)
            return app(environ, start_response)

        with self._answering(answer):
            try:
                yield has_come
            finally:
                is_over.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Refuse all requests, as those of someone without rights."""

        def refuse(_: Any, start_response: Any) -> Any:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]

        with self._answering(refuse):
            yield

    @contextmanager
    def _answering(self, app: Any) -> Iterator[None]:
        before, self.wsgi.app = self.wsgi.app, app
        try:
            yield
        finally:
            self.wsgi.app = before


class S3Server(ObjectServer):
    """Client of the tests' S3 server, in which a bucket has been created."""

    scheme = "s3"

    def __init__(self, url: str, wsgi: Any) -> None:
        super().__init__(wsgi)
        self.url = url
        self._client: Any = boto3.client("s3", endpoint_url=url, region_name=ENVIRONMENT["AWS_REGION"])
        self.empty()

    def empty(self) -> None:
        self._post("/moto-api/reset")
        self._client.create_bucket(Bucket=BUCKET)

    def put(self, objects: Mapping[str, bytes]) -> None:
        for key, content in objects.items():
            self._client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def objects(self) -> dict[str, bytes]:
        """Return the contents of all objects, by key."""
        listed = self._client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {one["Key"]: self._client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read() for one in listed}

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def admit_nobody(self) -> None:
        """Make the S3 server refuse all further requests: turn on authentication, with no key registered."""
        self._post("/moto-api/reset-auth", b"0")

    def admit_all(self) -> None:
        self._post("/moto-api/reset-auth", b"Infinity")

    def _post(self, path: str, content: bytes = b"") -> None:
        httpx.post(f"{self.url}{path}", content=content).raise_for_status()


@contextmanager
def running_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    server = S3Server(f"http://{host}:{port}", moto._server)
    try:
        yield server
    finally:
        server.admit_all()  # a setting of the process, like all that moto keeps
        moto.stop()
