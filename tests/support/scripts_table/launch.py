"""Run one script as `python script.py` does, and record its losses and weights.

This module does not import mfwrap: only scripts that train with it do.
"""

import hashlib
import json
import os
import random
import runpy
import sys
from collections.abc import Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import trainer

__all__ = ["FACTS", "NOISE", "OUTPUT", "WEIGHTS", "launch"]

FACTS, WEIGHTS, OUTPUT = "facts.json", "weights.safetensors", "output.txt"
"""Files that a run leaves in its folder."""
NOISE = 1e-6
"""A gradient whose values are all below this part of the largest one is nothing but rounding."""


def launch(
    folder: Path, script: Path, arguments: Sequence[str], search: Sequence[Path], hub: Path
) -> None:
    """Run a script. Its errors are raised.

    Args:
        folder: Folder that the script runs in, and that gets the files of the run.
        script: File of the script.
        arguments: Arguments of its command line.
        search: Folders that `import` searches first.
        hub: Folder with models and data sets that the script loads by their names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / OUTPUT).open("a", encoding="utf-8") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    for entry in hub.iterdir():
        if not (folder / entry.name).exists():  # of an earlier run
            (folder / entry.name).symlink_to(entry)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(path) for path in search]
    _seed()
    recorder = _Recorder()
    recorder.start()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    recorder.write(folder)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (the scripts use the global generator)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # A result that is read from the cache draws no random numbers.
    datasets.disable_caching()


class _Recorder:
    """Record what all optimizers and Trainers of the process do."""

    def __init__(self) -> None:
        self._optimizers: list[Any] = []
        self._digests: list[str] = []
        self._shares: dict[str, float] = {}
        self._losses: list[float] = []
        self._log: list[dict[str, float]] = []
        self._bfloat16 = False
        self._by_mfwrap = 0

    def start(self) -> None:
        """Begin to record.

        torch calls a hook after each step of an optimizer. transformers has a list of the callbacks
        of each Trainer. Loops without a Trainer have no log, so `torch.autograd.backward` is
        replaced by a function that notes the loss.
        """
        register_optimizer_step_post_hook(self._after_step)
        backward, losses, log = torch.autograd.backward, self._losses, self._log

        def noted(tensors: Any, *others: Any, **keywords: Any) -> None:
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                losses.append(tensors.item())
            backward(tensors, *others, **keywords)

        class Log(transformers.TrainerCallback):
            """Note the numbers of each log."""

            def on_log(self, args: Any, *_: Any, logs: Any = None, **__: Any) -> None:
                log.append(
                    {name: float(value) for name, value in logs.items() if _is_number(value)}
                )
                recorder._bfloat16 |= args.bf16

        recorder = self
        torch.autograd.backward = noted
        trainer.DEFAULT_CALLBACKS.append(Log)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        digest = hashlib.sha256()
        sizes = {}
        for name, weight in self._weights(optimizer):
            values = weight.detach().cpu().contiguous().view(-1)
            digest.update(values.view(torch.uint8).numpy())
            sizes[name] = 0.0 if weight.grad is None else weight.grad.abs().max().item()
        self._digests.append(digest.hexdigest())
        largest = max(sizes.values()) or 1.0
        for name, size in sizes.items():
            self._shares[name] = max(self._shares.get(name, 0.0), size / largest)
        self._by_mfwrap += _calls_come_from("mfwrap.step")

    def write(self, folder: Path) -> None:
        """Write the record and the final weights."""
        weights = {
            name: weight.detach().cpu().contiguous().clone()
            for optimizer in self._optimizers
            for name, weight in self._weights(optimizer)
        }
        save_file(weights, folder / WEIGHTS)
        facts = {
            "digests": self._digests,
            "losses": self._losses,
            "log": self._log,
            "bfloat16": self._bfloat16,
            "by_mfwrap": self._by_mfwrap,
            "noise": [name for name, share in self._shares.items() if share < NOISE],
        }
        (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")

    def _weights(self, optimizer: Any) -> Iterator[tuple[str, Any]]:
        """Return an optimizer's weights with names by their order."""
        [number] = [n for n, known in enumerate(self._optimizers) if known is optimizer]
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        return ((f"{number}.{index}", weight) for index, weight in enumerate(weights))


def _calls_come_from(package: str) -> bool:
    """Return whether a function of a package has called, directly or through others."""
    frame = sys._getframe()
    while frame := frame.f_back:
        if str(frame.f_globals.get("__name__")).startswith(f"{package}."):
            return True
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
