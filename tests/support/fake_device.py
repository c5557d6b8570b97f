"""A device in Python, without a GPU, that counts how often the host waits for it.

torch lets Python code provide the kernels of the device type that it reserves for other vendors.
Each tensor on the device stands for a tensor on the CPU, which does the computing. So code runs
as on a GPU, with the same numbers as on a CPU, and each copy to the host is an operator of its own.

The registration cannot be undone, so run this file in a process of its own (`count_waits`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from mfwrap import AdamWeightDecay, DynamicLossScaleUpdateCell, ExponentialMovingAverage, StepConfig
from mfwrap.accelerate import attach
from support.accelerate_loops import new_accelerator
from support.paths import TESTS

__all__ = ["count_waits"]

NAME = "counted"
OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "AdamWeightDecay": lambda weights: AdamWeightDecay(weights, lr=0.1),
    "fused SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, foreach=True),
}
FACTORS = (1.0, 1.0, float("nan"), 1.0, float("nan"), 1.0)


class FakeDevice:
    """Register the device, and note the reads of the host."""

    def __init__(self) -> None:
        _setup_privateuseone_for_python_backend(NAME)
        getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]
        self.device = torch.device(NAME, 0)
        self.reads: list[str] = []
        self._raw: dict[int, Tensor] = {}
        self._library = torch.library.Library("_", "IMPL")
        self._library.fallback(self._call, "PrivateUse1")
        zeros = torch.zeros

        def unpinned_zeros(*args: Any, pin_memory: bool = False, **keywords: Any) -> Tensor:
            del pin_memory
            return zeros(*args, **keywords)

        # torch has no pinned memory and no events for a device in Python.
        torch.zeros, torch.Event = unpinned_zeros, CountedEvent

    def _stands_on(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == NAME

    def _raw_of(self, value: Any) -> Any:
        if self._stands_on(value):
            return self._raw[value.untyped_storage()._cdata]
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    def _call(self, operator: Any, *args: Any, **keywords: Any) -> Any:
        name = operator.name()
        raw_args, raw_keywords = tree_map(self._raw_of, (args, keywords))
        if name == "aten::_copy_from":
            source, target, non_blocking = (*args, False)[:3]
            if self._stands_on(source) and not self._stands_on(target) and not non_blocking:
                self.reads.append(name)
            raw_args[1].copy_(raw_args[0])
            return target
        if name == "aten::_local_scalar_dense":
            self.reads.append(name)
        given = {
            id(self._raw_of(x)): x for x in tree_leaves((args, keywords)) if self._stands_on(x)
        }
        result = operator(*raw_args, **raw_keywords)
        for value in given.values():
            if value.shape != self._raw_of(value).shape:  # an `out` that the operator has resized
                value.data = self._new(self._raw_of(value))
        # An operator that writes to a tensor returns this tensor.
        return tree_map(lambda x: given[id(x)] if id(x) in given else self._new(x), result)

    def _new(self, raw: Any) -> Any:
        if not isinstance(raw, Tensor):
            return raw
        value = torch._C._acc.create_empty_tensor(tuple(raw.shape), raw.dtype)
        self._raw[value.untyped_storage()._cdata] = raw
        return value


class CountedEvent:
    """An event of the device."""

    num_waits = 0
    """How often the host has waited for any event."""

    def __init__(self, _device: object = None) -> None:
        pass

    def record(self, _stream: Any) -> None:
        """Do nothing: the device computes at once."""

    def synchronize(self) -> None:
        """Count the wait."""
        CountedEvent.num_waits += 1


class Network(nn.Module):
    """A network of operators that the device has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, inputs: Tensor, factor: Tensor) -> Tensor:
        """Return a loss, multiplied by `factor`."""
        return self.layers(inputs).square().mean() * factor


def count_waits(folder: Path) -> dict[str, Any]:
    """Train attached loops on the device in a new process, and on the CPU for comparison.

    Returns:
        For each optimizer and way of asking the schedule, a dict with one value per update:
        ``reads`` and ``waits`` on the device, ``rates`` that the updates used, and the
        ``expected`` rates, which are those of the CPU. ``asking`` has the waits of the questions.
    """
    answer = folder / "waits.json"
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "support.fake_device", str(answer)]
    subprocess.run(command, env=environment, check=True)
    result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return result


def _train(optimizer: str, device: torch.device, counts: Any, *, asks: bool) -> dict[str, Any]:
    accelerator = new_accelerator()
    PartialState._shared_state["device"] = accelerator.state.device = device
    step = attach(
        accelerator,
        StepConfig(local_norm=True, use_clip_grad=True),
        lambda network: ExponentialMovingAverage(network, 0.9),
        scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 2),
    )
    torch.manual_seed(0)
    network = Network().to(device)
    inner = OPTIMIZERS[optimizer](network.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    network, prepared, schedule = accelerator.prepare(network, inner, schedule)
    batches = [(torch.ones(3, 2).to(device), torch.tensor(f).to(device)) for f in FACTORS]
    found: dict[str, Any] = {name: [] for name in ("reads", "waits", "asking", "rates")}
    for batch in batches:
        counts.reads, CountedEvent.num_waits = [], 0
        accelerator.backward(network(*batch))
        accelerator.clip_grad_norm_(network.parameters(), 1.0)
        prepared.step()
        found["rates"].append(inner.param_groups[0]["lr"])
        schedule.step()
        prepared.zero_grad()
        found["reads"].append(len(counts.reads))
        found["waits"].append(CountedEvent.num_waits)
        if asks:
            schedule.get_last_lr()
            found["asking"].append(CountedEvent.num_waits - found["waits"][-1])
    step.flush()
    found["rates"].append(inner.param_groups[0]["lr"])
    return found


def _main() -> None:
    counts = FakeDevice()
    result = {}
    for optimizer in OPTIMIZERS:
        for asks in (False, True):
            found = _train(optimizer, counts.device, counts, asks=asks)
            on_cpu = _train(optimizer, torch.device("cpu"), counts, asks=asks)
            found["expected"] = on_cpu["rates"]
            result[f"{optimizer}, {'asked' if asks else 'not asked'}"] = found
    Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    _main()
