"""Browser login to the local servers' web pages, through a private file that passes the key to the browser.

A browser is started with the file's name on its command line, which everybody on the machine can see; never with the
key.
"""

import webbrowser
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from flows.ledger.home import home
from flows.servers.guard import LOGIN_PATH
from flows.servers.keyed import USER, key_file, open_private, read_key
from flows.servers.local import status
from stages.core.errors import ServerError

PAGE = """<!doctype html><meta name="referrer" content="no-referrer"><title>llm-lifecycle</title>
<script>location.replace("{address}")</script>
"""


def open_pages(pages: Mapping[str, str]) -> Iterator[str]:
    """Open the local servers' web pages in a browser; yield a line about each, with the file to open by hand.

    pages: which page of a server, from its `#` on, by the server's name; else its first one. Raises `ServerError` when
    none of the servers runs.
    """
    password = read_key()
    found = [one for one in status() if one.ours and one.healthy and one.url and one.name in ADDRESSES]
    if password is None or not found:
        raise ServerError("opening the pages of the local servers: none of them runs; `lifecycle up` starts them")
    for server in found:
        host = str(server.url).removeprefix("http://")
        address = ADDRESSES[server.name](host, password) + pages.get(server.name, "")
        page = _write(home() / server.name / "login.html", address)
        opened = webbrowser.open(page.as_uri())
        yield f"{server.name}: {'opened' if opened else 'open'} {page.as_uri()}"
    yield f"if a page asks for a name and a password, take them from {key_file()}: NAME:PASSWORD"


ADDRESSES: dict[str, Callable[[str, str], str]] = {
    # Behind the `#`, which a browser sends to no server; MLflow's pages use basic authentication.
    "prefect": lambda host, password: f"http://{host}{LOGIN_PATH}#{quote(f'{USER}:{password}')}",
    "mlflow": lambda host, password: f"http://{USER}:{quote(password)}@{host}{LOGIN_PATH}",
}
"""Functions that build the login address of each server's web page from its host, port and password."""


def _write(page: Path, address: str) -> Path:
    page.unlink(missing_ok=True)
    with open_private(page) as stream:
        stream.write(PAGE.format(address=address))
    return page
