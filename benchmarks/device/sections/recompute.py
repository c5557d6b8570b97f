"""Steps that are run again: what differs, which kernels make it differ, and what a check costs."""

import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState

from device import networks
from device.measuring import ratios, spread
from device.recording import Recording
from device.setup import Setup
from mfwrap.callbacks import RecomputeCheck
from mfwrap.records import read_json_lines

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic algorithms

MEASURED = 2
"""Checked steps in which is measured what is not deterministic."""


def measure(recording: Recording, setup: Setup) -> None:
    """Check steps of a Llama of 31 million parameters with both kinds of kernels."""
    warnings.filterwarnings("ignore")
    costs = {}
    for kernels, deterministic in (("default", False), ("deterministic", True)):
        setup.release()
        with recording.part(f"{kernels} kernels"):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            try:
                costs[kernels] = _checked(recording, setup, kernels)
            finally:
                torch.use_deterministic_algorithms(mode=False)
    if costs:
        texts = [f"{cost:.2f} with {kernels} kernels" for kernels, cost in costs.items()]
        recording.summarize(f"a checked step takes {' and '.join(texts)} of one without")


def _checked(recording: Recording, setup: Setup, kernels: str) -> float:
    """Train with a check in each second step; return the cost of a checked step as a ratio."""
    width, layers, rows, length = setup.size((512, 8, 16, 512), (32, 1, 2, 16))
    vocabulary = setup.size(4096, 64)
    network: Any = networks.llama(setup, width, layers, vocabulary=vocabulary, length=length)
    number = networks.num_parameters(network)
    batch = networks.tokens(setup, rows, length, vocabulary)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4, fused=True)
    state, control = TrainerState(), TrainerControl()
    seconds: tuple[list[float], list[float]] = ([], [])
    checks = setup.size(20, 4)
    with tempfile.TemporaryDirectory() as folder:
        check = RecomputeCheck(2, folder=folder)
        known: Any = {"model": network}
        check.on_train_begin(None, state, control, **known)
        for step in range(1, 2 * checks + 1):
            setup.synchronize()
            start = time.perf_counter()
            check.on_step_begin(None, state, control, **known)
            with torch.autocast(setup.kind, torch.bfloat16):
                loss = networks.loss_of(network(**batch))
            loss.backward()
            check.on_pre_optimizer_step(None, state, control, **known)
            optimizer.step()
            optimizer.zero_grad()
            setup.synchronize()
            seconds[step % 2].append(time.perf_counter() - start)
            state.global_step = step
            check.on_step_end(None, state, control, **known)
        check.on_train_end(None, state, control, **known)
        records = [one for each in Path(folder).glob("anomalies*") for one in read_json_lines(each)]
    notes = [one["explanation"] for one in records if one["kind"] == "note"]
    faults = [str(one["explanation"]) for one in records if one["kind"] != "note"]
    checked, others = (times[MEASURED:] for times in seconds)
    recording.row(
        f"Llama of {number / 1e6:.0f} million parameters, {rows * length} tokens a step, bfloat16",
        {
            "kernels": kernels,
            "checked steps": checks,
            "steps that differ": len(faults),
            "not deterministic": "; ".join(notes) or "nothing",
            "ms a step": spread([each * 1e3 for each in others]),
            "of it, a checked step": ratios(checked, others),
        },
    )
    recording.check(
        f"no step differs from its repetition with {kernels} kernels",
        holds=not faults,
        found=faults[0] if faults else "none of them",
    )
    found: float = ratios(checked, others)["median"]
    return found
