"""Push a model to a stand-in for the hub that records the requests of the hub's client."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from transformers import Trainer

from mfwrap.trainer import MFTrainer
from support.hub import environment_of, serving
from support.paths import ROOT
from support.trainer_runs import new_trainer
from support.trainer_table.trainings import Outcome

__all__ = ["pushed"]


def pushed(kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]) -> Outcome:
    """Train in a process of its own that pushes two checkpoints and the final model.

    The hub's client reads its address when it is imported, so it needs a new process.
    """
    with serving() as server:
        environment = environment_of(server, str(folder / "home")) | {
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)]),
        }
        name = "ours" if issubclass(kind, MFTrainer) else "stock"
        command = [sys.executable, "-m", __name__, name, str(folder / "run"), json.dumps(arguments)]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    tensors = {}
    facts = []
    for number, commit in enumerate(server.commits):
        facts.append((commit.title, sorted(commit.files)))
        weights = commit.files.get("model.safetensors")
        if weights is not None:
            found = safetensors.torch.load(weights)
            tensors |= {f"commit {number}: {key}": value for key, value in found.items()}
    assert facts
    assert tensors
    # The client may ask for the same thing more often if an upload takes longer. The address of a
    # large file is its checksum.
    requests = {each.partition("/objects/")[0] for each in server.requests}
    return Outcome([], tensors, {"commits": facts, "requests": sorted(requests)})


def _main(name: str, folder: str, arguments: str) -> None:
    kind: type[Trainer] = MFTrainer if name == "ours" else Trainer
    trainer = new_trainer(
        kind,
        Path(folder),
        save_strategy="steps",
        save_steps=2,
        hub_model_id="user/run",
        hub_always_push=True,
        **json.loads(arguments),
    )
    trainer.train()
    trainer.push_to_hub()


if __name__ == "__main__":
    _main(*sys.argv[1:])
