"""Proxy for HTTPS that decrypts and encrypts again, as those of companies do, with an authority of its own.

Only clients that ask it (HTTPS_PROXY) reach the hosts that it knows, whose names nothing else resolves, and only those
that trust its authority (SSL_CERT_FILE) accept their certificates.
"""

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.http_server import serving


@dataclass
class InspectingProxy:
    """Running proxy. authority: file with the certificate to trust. asked: hosts of the connections, in order."""

    url: str
    authority: Path
    asked: list[str] = field(default_factory=list)


@contextmanager
def inspecting_proxy(folder: Path, hosts: Mapping[str, int]) -> Iterator[InspectingProxy]:
    """Run a proxy to hosts that are HTTP servers on ports of this machine. folder: gets keys and certificates."""
    authority = _certificate(folder, "authority", ["basicConstraints=critical,CA:TRUE"])
    contexts = {}
    for host in hosts:
        contexts[host] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        issuer = ["-CA", str(authority), "-CAkey", str(authority.with_suffix(".key"))]
        certificate = _certificate(folder, host, ["basicConstraints=CA:FALSE", f"subjectAltName=DNS:{host}"], *issuer)
        contexts[host].load_cert_chain(certificate, certificate.with_suffix(".key"))

    class Handler(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            host = self.path.removesuffix(":443")
            proxy.asked.append(host)
            if host not in hosts:
                self.send_error(502)
                return
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            with (
                suppress(OSError),  # of clients that break off, since they refuse the certificate
                contexts[host].wrap_socket(self.connection, server_side=True) as client,
                socket.create_connection(("127.0.0.1", hosts[host])) as server,
            ):
                threading.Thread(target=_relay, args=(server, client), daemon=True).start()
                _relay(client, server)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        proxy = InspectingProxy(url, authority)
        yield proxy


def _relay(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def _certificate(folder: Path, name: str, extensions: list[str], *issuer: str) -> Path:
    """Return the file of a new certificate; its key lies beside it. Without an issuer it has signed itself."""
    path = folder / f"{name}.pem"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-keyout", str(path.with_suffix(".key"))]
    what = ["-days", "2", "-subj", f"/CN={name}", *(f"-addext={one}" for one in extensions)]
    subprocess.run(
        ["openssl", "req", "-x509", *key, "-out", str(path), *what, *issuer], check=True, capture_output=True
    )
    return path
