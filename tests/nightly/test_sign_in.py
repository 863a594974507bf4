"""Debian's Apache, with the shipped settings, shows pages to those who have signed in at an OpenID Connect provider."""

import base64
import os
import re
import socket
import subprocess
import sys
import urllib.parse
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from stages.core.supervised import SupervisedProcess
from tests.http_server import serving
from tests.serving import wait_for

pytestmark = pytest.mark.nightly

SETTINGS = Path(__file__).parents[2] / "deploy" / "apache" / "sign-in.conf"
MODULES = Path("/usr/lib/apache2/modules")
LOADED = ("mpm_event", "authn_core", "authz_core", "authz_user", "headers", "proxy", "proxy_http", "auth_openidc")
KEY = "a" * 64
MALLORY = "mallory@example.com"
FORGED = tuple(f"X{one}Forwarded{other}{what}" for what in ("User", "Groups") for one in "-_" for other in "-_")
FORGED += ("Forwarded",)
FORGED += tuple(f"X-Forwarded-{name}" for name in ("For", "Host", "Prefix", "Proto"))
GROUPS = ["release managers", "leads"]
ALICE, BOB = "alice@example.com", "bob@example.com"
MOCK = "oidc-provider-mock==0.3.4"


@contextmanager
def running(command, folder, port, **environment):
    log = folder / f"{port}.log"
    with log.open("wb") as output:
        process = SupervisedProcess(command, environment={**os.environ, **environment}, output=output, folder=folder)
    try:
        wait_for(lambda: answers(port) or process.poll() is not None, 60)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.stop()


def answers(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def provider(tmp_path_factory):
    """Run the stand-in for a provider, which knows Alice and, unverified, Bob, in an environment of its own."""
    folder, port = tmp_path_factory.mktemp("provider"), free_port()
    uv, python = Path(sys.executable).with_name("uv"), folder / "own" / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder / "own"], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, MOCK], check=True)
    with running([python, "-m", "oidc_provider_mock", f"--port={port}"], folder, port):
        url = f"http://localhost:{port}"
        for email in (ALICE, BOB):
            fields = {"email": email, "email_verified": email == ALICE, "groups": GROUPS}
            known = httpx.put(f"{url}/users/{urllib.parse.quote(email)}", json=fields)
            assert known.is_success, known.text
        yield url


@pytest.fixture
def pages(provider, tmp_path):
    """Run Apache before a server; yield the pages' address and the requests' headers, as the server got them."""
    assert (MODULES / "mod_auth_openidc.so").exists(), "needs Debian's package libapache2-mod-auth-openidc"
    got = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            got.append(self.headers)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"the page of the runs")

        def log_message(self, *_):
            pass

    port = free_port()
    main = [
        f"ServerRoot {tmp_path}",
        "ServerName localhost",
        f"Listen 127.0.0.1:{port}",
        "PidFile pid",
        "ErrorLog errors",
    ]
    main += [f"LoadModule {name}_module {MODULES}/mod_{name}.so" for name in LOADED]
    if os.getuid() == 0:
        main += ["User www-data", "Group www-data"]
    with serving(Server) as server:
        defined = [f"Define PAGES {server}", "Define PAGES_KEY ${LIFECYCLE_SERVERS_KEY}"]
        main += [f"<VirtualHost *:{port}>", *defined, f"Include {SETTINGS}", "</VirtualHost>"]
        (tmp_path / "apache.conf").write_text("\n".join(main) + "\n")
        named = {"OIDC_ISSUER": provider, "OIDC_CLIENT_ID": "pages", "OIDC_CLIENT_SECRET": "secret"}
        command = ["/usr/sbin/apache2", "-DFOREGROUND", "-f", tmp_path / "apache.conf"]
        with running(command, tmp_path, port, **named, OIDC_PASSPHRASE="p" * 32, LIFECYCLE_SERVERS_KEY=KEY):
            yield f"http://localhost:{port}/runs", got


def test_pages_are_shown_to_those_who_have_signed_in_and_to_no_one_else(pages, provider):
    url, got = pages
    with httpx.Client() as browser:
        forged = dict.fromkeys(("OIDC_CLAIM_email", "OIDC_CLAIM_groups", *FORGED), MALLORY)
        sent_away = browser.get(url, headers=forged)
        assert sent_away.status_code == 302 and sent_away.headers["location"].startswith(provider)
        assert got == []
        refused = browser.post(sent_away.headers["location"], data={"sub": ALICE, "action": "deny"})
        assert browser.get(refused.headers["location"]).status_code >= 400 and got == []
        sent_away = browser.get(url)
        allowed = browser.post(sent_away.headers["location"], data={"sub": ALICE})
        back = browser.get(allowed.headers["location"])
        assert back.headers["location"] == url
        page = browser.get(url, headers={**forged, "Authorization": "Basic forged"})
    assert (page.status_code, page.text) == (200, "the page of the runs")
    (headers,) = got
    assert headers.get_all("X-Forwarded-User") == [ALICE]
    assert headers.get_all("X-Forwarded-Groups") == [",".join(GROUPS)]
    assert headers.get_all("Authorization") == ["Basic " + base64.b64encode(f"lifecycle:{KEY}".encode()).decode()]
    assert MALLORY not in str(headers)
    assert not [name for name in headers if re.search("oidc|token", name, re.IGNORECASE)]
    assert headers["Cookie"] is None
    with httpx.Client() as browser:
        allowed = browser.post(browser.get(url).headers["location"], data={"sub": BOB})
        back = browser.get(allowed.headers["location"])
        assert browser.get(back.headers["location"]).status_code in (401, 403), "his address is not verified"
    # A forged session is none.
    assert httpx.get(url, cookies={"mod_auth_openidc_session": "0" * 36}).status_code == 302
    assert len(got) == 1
