"""A local stand-in for the hub: it takes the commits of the hub's client, and keeps their files."""

import base64
import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import huggingface_hub.constants
import pytest
import transformers.utils.hub

__all__ = ["TOKEN", "Commit", "Hub", "client_of", "environment_of", "serving"]

TOKEN = "hf_" + "x1" * 17
"""Access token that clients of the stand-in send. The stand-in does not check it."""

_LARGE = (".safetensors", ".bin", ".pt")
"""Endings of files that are uploaded with the protocol of Git LFS, as on the hub."""


class Commit(NamedTuple):
    """A commit that a client has made."""

    title: str
    """First line of its message."""

    files: dict[str, bytes]
    """Contents of the files that it adds or changes, by their paths in the repository."""


class Hub(ThreadingHTTPServer):
    """Stand in for the hub with one repository, ``user/run``.

    The endpoints are those that huggingface_hub calls to create a repository and to upload a
    folder: ``repos/create``, ``validate-yaml``, ``preupload``, the batches of Git LFS, the upload
    of a large file, and ``commit``. As on the hub, a file that has not changed is not committed
    again, and a large file whose content is known is not uploaded again.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.requests: list[str] = []
        """Method and path of each request, in order."""
        self.commits: list[Commit] = []
        """The commits, in order."""
        self.refuses: Callable[[str], bool] = lambda _: False
        """Whether to answer a request, given by method and path, with the status 403."""
        self.objects: dict[str, bytes] = {}
        """Contents of large files by their SHA-256."""

    @property
    def url(self) -> str:
        """Address of the stand-in."""
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def files(self) -> dict[str, bytes]:
        """Files of the repository, after all commits."""
        return {name: content for commit in self.commits for name, content in commit.files.items()}


class _Request(BaseHTTPRequestHandler):
    server: Hub

    def _answer(self, status: int = 200, **answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _is_refused(self) -> bool:
        request = f"{self.command} {self.path}"
        self.server.requests.append(request)
        if not self.server.refuses(request):
            return False
        self._answer(403, error="the stand-in refuses this request")
        return True

    def do_HEAD(self) -> None:
        if not self._is_refused():
            self.send_response(200)
            self.send_header("ETag", _oid(0))
            self.send_header("X-Repo-Commit", _oid(0))
            self.send_header("Content-Length", "0")
            self.end_headers()

    def do_GET(self) -> None:
        if not self._is_refused():
            sha = _oid(len(self.server.commits))
            self._answer(id="user/run", sha=sha, siblings=[], name="user", type="user", orgs=[])

    def do_PUT(self) -> None:
        body = self._body()
        if not self._is_refused():
            oid = self.path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            self.server.objects[oid] = body
            self._answer()

    def do_POST(self) -> None:
        body = self._body()
        if self._is_refused():
            return
        if self.path.endswith("/repos/create"):
            self._answer(url=f"{self.server.url}/user/run", id="user/run", name="user/run")
        elif "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            self._answer(files=[self._upload_of(name) for name in names])
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._answer(objects=[self._action_of(each) for each in json.loads(body)["objects"]])
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines() if line])
        else:
            self._answer()

    def _upload_of(self, name: str) -> dict[str, Any]:
        """Return how a file is uploaded, and the checksum of the repository's file if it has it."""
        is_large = name.endswith(_LARGE)
        known = self.server.files.get(name)
        oid = None
        if known is not None and is_large:
            oid = hashlib.sha256(known).hexdigest()
        elif known is not None:
            blob = b"blob %d\0" % len(known) + known
            oid = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
        mode = "lfs" if is_large else "regular"
        return {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _action_of(self, asked: dict[str, Any]) -> dict[str, Any]:
        oid = asked["oid"]
        upload = {"href": f"{self.server.url}/objects/{oid}"}
        actions = {} if oid in self.server.objects else {"actions": {"upload": upload}}
        return {"oid": oid, "size": asked["size"], **actions}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        files = {}
        title = ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                title = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        self.server.commits.append(Commit(title, files))
        oid = _oid(len(self.server.commits))
        url = f"{self.server.url}/user/run/commit/{oid}"
        self._answer(commitUrl=url, commitOid=oid, success=True)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def _oid(number: int) -> str:
    return f"{number:040x}"


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Start the stand-in within the block."""
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def environment_of(hub: Hub, home: str) -> dict[str, str]:
    """Return the environment of a process whose hub is the stand-in.

    Args:
        hub: The stand-in.
        home: Folder for the client's files.
    """
    return os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": home,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # Xet, which replaces Git LFS, is a binary protocol.
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": TOKEN,
        "NO_PROXY": "127.0.0.1",
    }


@contextlib.contextmanager
def client_of(url: str) -> Iterator[None]:
    """Make the stand-in the hub of this process within the block.

    The client reads the environment when it is imported, so its constants are set, too.

    Args:
        url: Address of the stand-in.
    """
    constants = {
        "ENDPOINT": url,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(huggingface_hub.constants, name, value)
        # The functions of the client's package are methods of one client, made at import.
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
        # Newer releases of transformers keep a client with the address of its first call.
        patch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield
