"""Captured steps: equal to plain ones, how fast they are, and what is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from device import networks, ways
from device.measuring import milliseconds, ratios, steps_in_turns, work_of
from device.networks import Batch, regression_data, regressor
from device.recording import Recording
from device.setup import Setup
from device.ways import Step
from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, MFTrainOneStepCell
from mfwrap.step.captured import WARM_UP

# cuBLAS reads this when it is first used; deterministic algorithms ask for it.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

UPDATES = 200
STARTING_SCALE = 2.0**26
"""So high that the first updates overflow in float16."""
WINDOW = 15
"""Updates after which the scale grows, so that overflows come again and again."""


def measure(recording: Recording, setup: Setup) -> None:
    """Compare captured and plain steps; try what cannot be captured at the end."""
    with recording.part("equal to plain steps"):
        _equality(recording, setup)
    timed: dict[int, dict[str, Step]] = {}
    sizes = setup.size(((256, 4, 1, 128), (768, 12, 8, 512)), ((32, 1, 2, 16),))
    for width, layers, rows, length in sizes:
        with recording.part(f"speed, width {width}"):
            timed[width] = _speed(recording, setup, width, layers, rows=rows, length=length)
    # After the last time: a profile leaves CUPTI attached, which slows launches down.
    for width, steps in timed.items():
        for name, step in steps.items():
            with recording.part(f"launches of {name}, width {width}"):
                _launches(recording, setup, f"{name}, width {width}", step)
    with recording.part("refused at construction"):
        _refusals(recording, setup)
    with recording.part("refused in the capture"):
        _failing_capture(recording, setup)


def _equality(recording: Recording, setup: Setup) -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        updates = setup.size(UPDATES, 30)
        plain = _trained(setup, updates, capture=False)
        captured = _trained(setup, updates, capture=True)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    skipped = plain["overflow"]
    parts = {"losses": "loss", "loss scales": "loss_scale", "skipped updates": "overflow"}
    parts |= {"norms": "global_norm", "weights": "weights", "averages": "averages"}
    for label, name in parts.items():
        ours, expected = captured[name].double(), plain[name].double()
        differing = (ours != expected) & ~(ours.isnan() & expected.isnan())
        size = expected[expected.isfinite()].abs().max().item() if expected.numel() else 0.0
        gap = (ours - expected)[differing].abs().max().item() if differing.any() else 0.0
        recording.row(
            f"captured and plain steps after {updates} updates in float16",
            {
                "what": label,
                "values": ours.numel(),
                "different ones": int(differing.sum()),
                "largest difference": gap,
                "largest value": size,
            },
        )
        recording.check(
            f"captured {label} are those of plain steps",
            holds=not differing.any(),
            found=f"{int(differing.sum())} of {ours.numel()} differ, by {gap:.2g} at most",
        )
    recording.check(
        "some updates overflow, and most do not",
        holds=0 < int(skipped.sum()) < updates / 2,
        found=f"{int(skipped.sum())} of {updates} overflow",
    )


def _trained(setup: Setup, updates: int, *, capture: bool) -> dict[str, Tensor]:
    network = regressor(setup)
    average = ExponentialMovingAverage(network, 0.9)
    cell = ways.full_cell(
        network,
        # Rates that float32 holds exactly: captured steps read them from a table on the device.
        2.0**-13,
        lambda optimizer: StepLR(optimizer, 40, gamma=0.5),
        capture=capture,
        scale_sense=DynamicLossScaleUpdateCell(STARTING_SCALE, 2, WINDOW),
        ema=average,
    )
    batches = regression_data(setup, 10)
    outputs = [cell(**batches[number % 10]) for number in range(updates)]
    cell.flush()
    found = {
        name: torch.stack([getattr(output, name) for output in outputs]).cpu()
        for name in ("loss", "loss_scale", "overflow", "global_norm")
    }
    averages: list[Tensor] = list(average.state_dict()["averages"].values())
    found["weights"] = _joined(list(network.parameters()))
    found["averages"] = _joined(averages)
    return found


def _joined(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])


def _speed(
    recording: Recording, setup: Setup, width: int, layers: int, *, rows: int, length: int
) -> dict[str, Step]:
    """Time the steps in turns, and return those that could be timed."""
    ways.forget_accelerators()
    vocabulary = setup.size(32_768, 64)
    batch = networks.masked_tokens(setup, rows, length, vocabulary)
    names = {
        "torch alone, everything on": ways.plain_with_everything,
        "accelerate loop: clip, AdamW, schedule": ways.accelerate_loop,
        "cell, everything on": ways.cell_with_everything,
        "captured cell, everything on": ways.captured_cell,
    }
    steps: dict[str, Step] = {}
    for name, way in names.items():
        with recording.part(f"{name}, width {width}"):
            network = networks.llama(setup, width, layers, vocabulary=vocabulary, length=length)
            step = way(setup, network, batch)
            for _ in range(WARM_UP + 2):  # with the capture and a replay
                step()
            setup.synchronize()
            steps[name] = step
    plain, *_ = names
    rounds, number = setup.size((5, 30), (2, 2))
    times = steps_in_turns(setup, steps, rounds=rounds, steps=number)
    for name in steps:
        ratio = ratios(times[name].whole, times[plain].whole) if plain in steps else None
        recording.row(
            f"steps of a Llama of {layers} layers with width {width}, {rows * length} tokens, "
            "float32",
            {
                "step": name,
                "ms": milliseconds(times[name].whole),
                "of torch alone": ratio,
                "queued by the host after, ms": milliseconds(times[name].host),
            },
        )
        if name.startswith("captured") and ratio:
            recording.summarize_more(f"width {width}: {ratio['median']:.2f} of torch's step")
    return steps


def _launches(recording: Recording, setup: Setup, name: str, step: Step) -> None:
    work = work_of(setup, step, calls=2)
    recording.row(
        "work of these steps",
        {
            "step": name,
            "kernels": work.num_kernels,
            "launches": work.launches,
            "kernels take, ms": None if work.seconds is None else work.seconds * 1e3,
        },
    )


def _refusals(recording: Recording, setup: Setup) -> None:
    """What cannot be captured is refused when the cell is built."""

    def unfused(network: nn.Module) -> dict[str, Any]:
        return {"optimizer": torch.optim.AdamW(network.parameters(), 1e-3)}

    def hooked(network: nn.Module) -> dict[str, Any]:
        optimizer = ways.adamw(network)
        optimizer.register_step_post_hook(lambda *_: None)
        return {"optimizer": optimizer}

    def seldom(network: nn.Module) -> dict[str, Any]:
        return {"ema": ExponentialMovingAverage(network, 0.9, update_every=2)}

    def elsewhere(network: nn.Module) -> dict[str, Any]:
        return {"ema": ExponentialMovingAverage(network, 0.9, device="cpu")}

    cases: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
        "an optimizer that is not fused": unfused,
        "an optimizer with a hook": hooked,
        "an average of every second update": seldom,
    }
    if setup.on_cuda:
        cases["an average on the CPU"] = elsewhere
    for name, settings_of in cases.items():
        network = regressor(setup)
        settings = settings_of(network)
        optimizer = settings.pop("optimizer", None) or ways.adamw(network)
        try:
            MFTrainOneStepCell(network, optimizer, capture=True, **settings)
        except ValueError as error:
            recording.row("refused", {"what": name, "error": str(error)})
        else:
            recording.fail(f"refused: {name}", "no error at construction")


class ReadingNetwork(nn.Module):
    """A network that reads its loss on the host, which no graph can hold."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.network(**batch)
        return loss if loss.item() < 1e9 else loss * 0


def _failing_capture(recording: Recording, setup: Setup) -> None:
    """Let a capture fail in another process: this one might not be able to use CUDA after it."""
    command = [sys.executable, "-m", "device.sections.captured", setup.kind]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if ended.returncode:
        message = f"the process ended with {ended.returncode}: {ended.stderr[-600:]}"
        raise RuntimeError(message)
    found = json.loads(ended.stdout.splitlines()[-1])
    recording.row("a capture that fails", {"network": "reads its loss on the host", **found})
    if setup.on_cuda:
        recording.check(
            "a network that reads is refused in one sentence",
            holds=found["error"].startswith(("RuntimeError", "ValueError")),
            found=found["error"],
        )


def fail_in_a_capture(setup: Setup) -> dict[str, str]:
    """Train a network that reads its loss with a captured cell, and then a plain one."""
    batch: Batch = regression_data(setup, 1)[0]
    cell = ways.full_cell(ReadingNetwork(regressor(setup)), capture=True)
    error = "none: on a CPU there is no capture"
    try:
        for _ in range(6):
            cell(**batch)
    except Exception as caught:  # noqa: BLE001  (which error it is, is the result)
        error = f"{type(caught).__name__}: {caught}"
    after = "a plain step works"
    try:
        ways.full_cell(regressor(setup))(**batch).loss.item()
    except Exception as caught:  # noqa: BLE001  (which error it is, is the result)
        after = f"{type(caught).__name__}: {caught}"
    return {"error": error[:500], "after it": after[:500]}


if __name__ == "__main__":
    print(json.dumps(fail_in_a_capture(Setup(sys.argv[1], small=True))), flush=True)
    # Leave out what an interpreter does at its end: it may fail or hang after a failed capture.
    os._exit(0)
