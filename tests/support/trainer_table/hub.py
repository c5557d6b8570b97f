"""Push a model to a local server that records the requests of the hub's client."""

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import safetensors.torch
from transformers import Trainer

from mfwrap.trainer import MFTrainer
from support.paths import ROOT
from support.trainer_runs import new_trainer
from support.trainer_table.trainings import Outcome

__all__ = ["pushed"]

_COMMIT = "0" * 40


class _Hub(ThreadingHTTPServer):
    """Stand in for the hub: accept every upload as ordinary files in commits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.requests: list[str] = []
        """Method and path of each request, in order."""
        self.commits: list[dict[str, Any]] = []
        """Title of each commit, and the contents of its files by name."""


class _Request(BaseHTTPRequestHandler):
    server: _Hub

    def _answer(self, **answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
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

    def do_GET(self) -> None:
        self.server.requests.append(f"GET {self.path}")
        self._answer(id="user/run", sha=_COMMIT, siblings=[], name="user", type="user", orgs=[])

    def do_POST(self) -> None:
        self.server.requests.append(f"POST {self.path}")
        body = self._body()
        root = f"http://127.0.0.1:{self.server.server_port}"
        if self.path.endswith("/repos/create"):
            self._answer(url=f"{root}/user/run", id="user/run", name="user/run")
        elif "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            files = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            self._answer(files=files)
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines() if line]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            title = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            self.server.commits.append({"title": title, "files": files})
            self._answer(
                commitUrl=f"{root}/user/run/commit/{_COMMIT}", commitOid=_COMMIT, success=True
            )
        else:
            self._answer()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextlib.contextmanager
def _serving() -> Iterator[_Hub]:
    with _Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def pushed(kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]) -> Outcome:
    """Train in a process of its own that pushes two checkpoints and the final model.

    The hub's client reads its address when it is imported, so it needs a new process.
    """
    with _serving() as server:
        environment = os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)]),
        }
        name = "ours" if issubclass(kind, MFTrainer) else "stock"
        command = [sys.executable, "-m", __name__, name, str(folder / "run"), json.dumps(arguments)]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    tensors = {}
    for number, commit in enumerate(server.commits):
        weights = commit["files"].pop("model.safetensors", b"")
        if weights:
            found = safetensors.torch.load(weights)
            tensors |= {f"commit {number}: {key}": value for key, value in found.items()}
    facts = [(commit["title"], sorted(commit["files"])) for commit in server.commits]
    assert facts
    assert tensors
    # The client may ask for the same thing more often if an upload takes longer.
    return Outcome([], tensors, {"commits": facts, "requests": sorted(set(server.requests))})


def _main(name: str, folder: str, arguments: str) -> None:
    kind: type[Trainer] = MFTrainer if name == "ours" else Trainer
    trainer = new_trainer(
        kind,
        Path(folder),
        save_strategy="steps",
        save_steps=2,
        hub_model_id="user/run",
        hub_token="hf_token",  # noqa: S106  (for a local server that ignores it)
        hub_always_push=True,
        **json.loads(arguments),
    )
    trainer.train()
    trainer.push_to_hub()


if __name__ == "__main__":
    _main(*sys.argv[1:])
