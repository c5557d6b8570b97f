"""Operators that compute wrongly in one of two runs of a step, on the simulated device."""

import random
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mfwrap.callbacks import RecomputeCheck
from mfwrap.records import read_json_lines
from support.device.device import Device
from support.recomputed import FIRST, MICRO_BATCHES, Fault, Planter, flip, train

__all__ = ["found"]

NUMBER = 50
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm"})
_ROWS, _WIDTH, _INNER = 5, 8, 12


class Gated(nn.Module):
    """A perceptron with a gate; no module returns what its last layer receives."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(_WIDTH, _INNER), nn.Linear(_WIDTH, _INNER)
        self.drop, self.down = nn.Dropout(0.2), nn.Linear(_INNER, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.up(inputs) * self.drop(self.gate(inputs)).sigmoid()
        return self.down(values).square().mean()


def faults() -> list[Fault]:
    """Draw a wrong product for each step: in a forward, or one of the two of a backward."""
    drawn = random.Random(3)  # noqa: S311  (not cryptographic)
    found = []
    for step in range(FIRST, FIRST + NUMBER):
        kind = drawn.choice(("output", "gradient of weight", "gradient of input"))
        module = "down" if kind == "gradient of input" else drawn.choice(("up", "gate", "down"))
        fault = Fault(
            step,
            kind,
            module,
            micro_batch=drawn.randrange(MICRO_BATCHES),
            run=drawn.randrange(2),
            element=drawn.randrange(10**6),
            bit=drawn.randrange(23),
        )
        found.append(fault)
    return found


class Products(Planter):
    """Let a linear layer's product be wrong by one bit.

    Args:
        network: The network.
        wrong: Faults of its linear layers.
        device: The device.
    """

    def __init__(self, network: nn.Module, wrong: Iterable[Fault], device: Device) -> None:
        super().__init__(network, ())
        self._device, self._due = device, None
        self._spoiling: Any = None
        modules = dict(network.named_modules())
        for fault in wrong:
            module = modules[fault.module]
            module.register_forward_pre_hook(partial(self._begin, fault))
            module.register_forward_hook(partial(self._end, fault))

    def _begin(self, fault: Fault, *_: Any) -> None:
        if self.is_due(fault) and fault.kind == "output":
            self._spoil_next(fault, None)

    def _end(self, fault: Fault, module: nn.Module, _: Any, output: Tensor) -> None:
        if self.is_due(fault) and fault.kind != "output":
            of_weight = fault.kind == "gradient of weight"
            shape = set(module.weight.shape) if of_weight else {_ROWS, _INNER}
            output.register_hook(lambda _: self._spoil_next(fault, shape))

    def _spoil_next(self, fault: Fault, shape: set[int] | None) -> None:
        """Flip a bit in the next product, of this shape or of its transposed one."""
        spoiling = None

        def spoil(name: str, result: Any) -> None:
            nonlocal spoiling
            if name in _PRODUCTS and (shape is None or set(result.shape) == shape):
                flip(result, fault)
                self.num_planted += 1
                spoiling.__exit__(None, None, None)

        spoiling = self._device.spoiling(spoil)
        spoiling.__enter__()


def found() -> dict[str, Any]:
    """Train on the device with wrong products, and without.

    Returns:
        ``expected`` and ``found`` places of the faults, their devices, and what has been seen
        without a fault.
    """
    device = Device()

    def batch(step: int, micro_batch: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + micro_batch)
        return {"inputs": torch.randn(_ROWS, _WIDTH, generator=generator).to(device.device)}

    def run(folder: Path, wrong: list[Fault], num_steps: int) -> list[Any]:
        torch.manual_seed(0)
        network = Gated().to(device.device)
        train(
            RecomputeCheck(1, folder=folder),
            network,
            num_steps,
            faults=wrong,
            batch=batch,
            loss_of=lambda output: output,
            planter=partial(Products, device=device),
        )
        file = folder / "anomalies.jsonl"
        return read_json_lines(file) if file.exists() else []

    with tempfile.TemporaryDirectory() as place:
        wrong = faults()
        records = run(Path(place) / "wrong", wrong, wrong[-1].step)
        with device.watching() as watch:
            none = run(Path(place) / "right", [], 4)
    expected = [fault.place for fault in wrong]
    return {
        "expected": expected,
        "found": [{key: record.get(key) for key in expected[0]} for record in records],
        "devices": sorted({record["device"].partition(" ")[0] for record in records}),
        "without": none,
        "faults": [str(fault) for fault in watch.faults],
        "reads": list(watch.reads),
    }
