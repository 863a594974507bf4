"""Uploads to the stand-in for a model hub by ModelScope's API: large files by sha256, commits."""

import base64
import json
import re
from typing import Any
from urllib.parse import unquote

from tests.hub_repository import Repository
from tests.hub_uploads import Uploads


class ModelScopeUploads(Uploads):
    """Request handler of the stand-in for a model hub, for uploads by ModelScope's and by Hugging Face's API."""

    def take(self, method: str, path: str) -> bool:
        if super().take(method, path):
            return True
        routes = (
            ("GET", r"/openapi/v1/models/([^/]+/[^/]+)", self._about),
            ("POST", r"/api/v1/models", self._make),
            ("POST", r"/api/v1/repos/models/([^/]+/[^/]+)/info/lfs/objects/batch", self._blobs),
            ("POST", r"/api/v1/repos/models/([^/]+/[^/]+)/commit/([^/]+)", self._actions),
        )
        for wanted, pattern, answer in routes:
            match = re.fullmatch(pattern, unquote(path.partition("?")[0]))
            if method == wanted and match:
                content = json.loads(self._body()) if method == "POST" else {}
                fault = self.server_state.take_fault(path)
                if fault and fault.status:
                    self._says(fault.status, "out of order")
                elif self._may(method, match[1] if match.groups() else None):
                    answer(content, *match.groups())
                return True
        return False

    def _may(self, method: str, name: str | None) -> bool:
        """Return whether the token may access a repository (None: may create one); if not, answer with an error."""
        role = self.server_state.token_roles.get(self._token())
        if role is None:
            self._says(401, "invalid token")
        elif name and name not in self.server_state.repositories:
            self._says(404, "not found")
        elif method == "POST" and role != "write":
            self._says(403, "no permission")
        else:
            return True
        return False

    def _about(self, _: dict[str, Any], name: str) -> None:
        about = {"id": name, "private": self.server_state.repositories[name].private}
        self._answer(200, {"success": True, "data": about})

    def _make(self, asked: dict[str, Any]) -> None:
        name, private = f"{asked['Path']}/{asked['Name']}", asked["Visibility"] == 1
        made = Repository(private=private, token=self._token() if private else None)
        files = {".gitattributes": b"*.safetensors filter=lfs\n", "README.md": asked["License"].encode()}
        made.commit(files, branch="master")
        self.server_state.repositories[name] = made
        self._says(200, "", {"Id": 1, "Path": asked["Path"], "Name": asked["Name"]})

    def _blobs(self, asked: dict[str, Any], name: str) -> None:
        objects = self.server_state.repositories[name].objects
        url = f"{self.server_state.url}/lfs/{name}"
        needed = [one for one in asked["objects"] if one["oid"] not in objects]
        answered = [{**one, "actions": {"upload": {"href": f"{url}/{one['oid']}"}}} for one in needed]
        self._says(200, "", {"objects": answered})

    def _actions(self, asked: dict[str, Any], name: str, branch: str) -> None:
        repository = self.server_state.repositories[name]
        files = dict(repository.files_at(branch) or {})
        for one in asked["actions"]:
            if one["action"] == "delete":
                del files[one["path"]]
            elif one["type"] == "lfs":
                files[one["path"]] = repository.objects[one["sha256"]]
            else:
                files[one["path"]] = base64.b64decode(one["content"])
            assert one["action"] == "delete" or len(files[one["path"]]) == one["size"]
        self._says(200, "", {"CommitId": repository.commit(files, branch=branch)})

    def _says(self, status: int, message: str, data: object = None) -> None:
        body = {"Code": status, "Success": status == 200, "Message": message, "Data": data}
        self._answer(status, body)
