"""Pickle what an attached accelerator has prepared, and load it in a process without mfwrap."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from support.paths import TESTS

__all__ = ["MyAccelerator", "Prepared", "average", "load_in_a_new_process", "prepare"]


class MyAccelerator(Accelerator):
    """An accelerator class of a user."""


class Prepared(NamedTuple):
    """A training that an accelerator has prepared."""

    accelerator: Any
    network: Any
    optimizer: Any
    schedule: Any

    def update(self, factor: float = 1.0) -> None:
        """Run an update whose loss is multiplied by `factor`."""
        self.accelerator.backward(self.network(torch.ones(3, 2)).square().mean() * factor)
        self.accelerator.clip_grad_norm_(self.network.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def average(network: nn.Module) -> Any:
    """Return an average of a network's weights."""
    from mfwrap import ExponentialMovingAverage  # noqa: PLC0415  (a new process may lack mfwrap)

    return ExponentialMovingAverage(network, 0.9)


def prepare(accelerator: Accelerator) -> Prepared:
    """Return a small training that `accelerator` has prepared."""
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    optimizer = AdamW(network.parameters(), lr=0.1, fused=True)
    schedule = StepLR(optimizer, 1, gamma=0.5)
    return Prepared(accelerator, *accelerator.prepare(network, optimizer, schedule))


def load_in_a_new_process(value: Any, file: Path) -> dict[str, Any]:
    """Pickle a value that begins with the fields of `Prepared`, and load it in a new process.

    Returns:
        ``modules``: modules of mfwrap that the process has imported; ``types``: names of the types
        of all elements; ``weight``: weights after a further update there.
    """
    file.write_bytes(pickle.dumps(value))
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1"}
    answer = file.with_suffix(".json")
    command = [sys.executable, "-m", "support.pickled_training", str(file), str(answer)]
    subprocess.run(command, env=environment, check=True)
    result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return result


def _main() -> None:
    loaded = pickle.loads(Path(sys.argv[1]).read_bytes())  # noqa: S301  (written by the test)
    # accelerate's schedules need the state that any accelerator sets up in its process.
    Accelerator(cpu=True)
    prepared = Prepared(*loaded[:4])
    prepared.update()
    result = {
        "modules": [name for name in sys.modules if name.partition(".")[0] == "mfwrap"],
        "types": [type(each).__name__ for each in loaded],
        "weight": prepared.network.weight.tolist(),
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    # Under its own name, this file is the module in which pickles find the classes above.
    from support.pickled_training import _main as main

    main()
