"""Fake hub for tests: a web server with an `index.json` of file names, sizes and digests."""

import json
import os
import urllib.request

from stages.hubs.hub import Request, Source
from stages.hubs.listing import Digest, content_hash
from stages.hubs.repository import RemoteFile, RepositoryHub, Snapshot


class IndexHub(RepositoryHub):
    def resolve_revision(self, request: Request) -> str:
        return self._list(request.source).revision

    def list_snapshot(self, source: Source, revision: str) -> Snapshot:
        return self._list(source)

    def _list(self, source: Source) -> Snapshot:
        address = f"{os.environ['INDEX_HUB']}/{source.name}"
        with urllib.request.urlopen(f"{address}/index.json") as answer:
            index = json.load(answer)
        files = tuple(
            RemoteFile(name, size, Digest("sha256", sha256), f"{address}/{name}")
            for name, (size, sha256) in index.items()
        )
        return Snapshot(str(source), content_hash((file.name, file.digest.hex) for file in files), files, "TOKEN", {})


HUB = IndexHub()
