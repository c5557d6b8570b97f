"""Record the series of clean runs and of faulty ones, from which the limits of judges are chosen.

Run ``python -m support.faults.series clean FOLDER`` or ``... faulty FOLDER`` in the folder of the
tests. It writes one ``.npz`` file for each run.
"""

import dataclasses
import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState

from support.faults.campaign import drawn_cases, records_in
from support.faults.kinds import truth_of
from support.faults.networks import ARCHITECTURES
from support.faults.training import Case, train

__all__ = ["SAMPLE_INTERVAL", "Series", "clean_cases", "record"]

SAMPLE_INTERVAL = 10
"""Steps from one sample of weights and moments to the next."""

_OUTPUTS = ("loss", "learning_rate", "global_norm", "local_norm")


class Series(TrainerCallback):
    """Collect the series of a run: each step's numbers, and samples of weights and moments.

    `arrays` has for each step ``loss``, ``learning_rate``, ``global_norm``, ``skipped`` and
    ``local_norm``, shape ``(G,)``; for each sample ``sample_step`` and, of shape ``(G,)``, the L2
    norms ``weight_norm``, ``exp_avg`` and ``exp_avg_sq`` after the update, ``update_ratio`` (norm
    of the change of a weight to its norm before) and ``zero_share`` of the gradients.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, list[np.ndarray]] = {}
        self.names: list[str] = []
        """Names of the groups: each trainable weight is one."""

        self._before: list[Tensor] = []
        self._zeros: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Keep the weights before a step that is sampled."""
        del args, control
        if (state.global_step + 1) % SAMPLE_INTERVAL == 0:
            weights = _trainable(others["model"])
            self.names = list(weights)
            self._before = [weight.detach().clone() for weight in weights.values()]
            self._zeros = {name: torch.tensor(1.0) for name in weights}
            self._hooks = [
                weight.register_hook(lambda gradient, name=name: self._count_zeros(name, gradient))
                for name, weight in weights.items()
            ]

    def _count_zeros(self, name: str, gradient: Tensor) -> None:
        self._zeros[name] = (gradient == 0).float().mean()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Collect the numbers of a step."""
        del args, control
        for name in _OUTPUTS:
            self._add(name, getattr(others["step_output"], name))
        self._add("skipped", others["step_report"].skipped)
        if self._hooks:
            self._sample(state.global_step, _trainable(others["model"]), others["optimizer"])

    def _sample(
        self, step: int, weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        norms = torch.stack([old.float().norm() for old in self._before])
        updates = torch.stack(
            [
                (new.detach().float() - old.float()).norm()
                for new, old in zip(weights.values(), self._before, strict=True)
            ]
        )
        self._add("sample_step", torch.tensor(step))
        self._add("weight_norm", torch.stack([new.float().norm() for new in weights.values()]))
        self._add("update_ratio", updates / norms)
        self._add("zero_share", torch.stack([self._zeros[name] for name in weights]))
        for name in ("exp_avg", "exp_avg_sq"):
            moments = [
                optimizer.state[weight][name].float().norm()
                if weight in optimizer.state
                else torch.tensor(0.0)
                for weight in weights.values()
            ]
            self._add(name, torch.stack(moments))

    def _add(self, name: str, value: Tensor) -> None:
        self.arrays.setdefault(name, []).append(value.detach().float().cpu().numpy())

    def save(self, path: Path, **notes: Any) -> None:
        """Write the series to an ``.npz`` file, with notes as JSON."""
        arrays: dict[str, Any] = {name: np.stack(rows) for name, rows in self.arrays.items()}
        arrays |= {name: np.array(json.dumps(note)) for name, note in notes.items()}
        np.savez_compressed(path, names=np.array(self.names), **arrays)


def _trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


def clean_cases(number: int = 60, num_steps: int = 400) -> list[Case]:
    """Return clean runs of three sizes, in float32 and bfloat16, with warm-up and without.

    Every architecture has its turn. Batches are small or not, and rates high but stable or not.
    """
    dice = random.Random(0)  # noqa: S311  (test data, not cryptography)
    names = list(ARCHITECTURES)
    first = Case(architecture=names[0], way="cell", num_steps=num_steps)
    return [
        replace(
            first,
            architecture=names[place % len(names)],
            width=(width := dice.choice([16, 32, 64])),
            dtype="bfloat16" if place % 3 == 2 else "float32",
            warmup=dice.choice([1, 20]),
            batch_size=dice.choice([1, 4, 8]),
            # Wider networks are not stable at the highest rate.
            rate=dice.choice([1e-3, 3e-3] if width == 64 else [1e-3, 3e-3, 1e-2]),
            seed=place,
        )
        for place in range(number)
    ]


def record(cases: Iterable[Case], folder: Path) -> None:
    """Train cases, and write their series to a folder, with case, truth and records as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, case in enumerate(cases):
        path = folder / f"{place:03}.npz"
        if path.exists():
            continue
        series = Series()
        with tempfile.TemporaryDirectory() as run_folder:
            train(case, Path(run_folder), [series])
            records = records_in(Path(run_folder))
        truth = None
        if case.fault is not None:
            truth = dataclasses.asdict(truth_of(case.fault, ARCHITECTURES[case.architecture]))
        series.save(path, case=dataclasses.asdict(case), truth=truth, records=records)
        logging.getLogger(__name__).info(
            "%d %s %s: records at steps %s",
            place,
            case.architecture,
            None if case.fault is None else case.fault.kind,
            [one["step"] for one in records],
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    record(
        clean_cases() if sys.argv[1] == "clean" else drawn_cases(0, 200),
        Path(sys.argv[2]),
    )
