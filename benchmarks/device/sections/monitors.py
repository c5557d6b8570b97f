"""What monitors cost: whole steps of MFTrainer in bfloat16, without monitors and with them."""

import argparse
import random
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from device import networks
from device.measuring import peak_of, ratios, spread
from device.recording import Recording, need
from device.setup import Setup
from device.ways import forget_accelerators
from monitors import EACH, LOGITS, NORMS, OFF, ON, STATES, STEPS, TENTH, seconds_per_step
from trainer import build_model

KINDS = (OFF, NORMS, STEPS, STATES, LOGITS, ON, EACH, TENTH)


def measure(recording: Recording, setup: Setup) -> None:
    """Train with each kind of monitors in turn, and write their table after each run."""
    warnings.filterwarnings("ignore")
    need("tensorboard")
    transformers_logging.set_verbosity_error()
    options = argparse.Namespace(
        device=setup.kind,
        width=setup.size(1024, 32),
        layers=setup.size(8, 1),
        batch_size=setup.size(64, 2),
        sequence_length=setup.size(256, 16),
        accumulation=1,
        steps=setup.size(25, 12),
        interval=10,
    )
    kinds = list(KINDS)
    samples = options.batch_size * options.steps
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4096, (samples, options.sequence_length), generator=generator)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    peaks: dict[str, float] = {}
    order = random.Random(0)  # noqa: S311  (not cryptographic)
    for _ in range(setup.size(2, 1)):
        order.shuffle(kinds)
        for kind in kinds:
            setup.release()
            forget_accelerators()
            model = build_model(options.width, options.layers, options.sequence_length)

            def train(kind: str = kind, model: Any = model) -> None:
                seconds[kind].append(seconds_per_step(kind, model, tokens, options))

            peaks[kind] = _peak_of_run(setup, train)
            recording.table(
                f"MFTrainer with monitors, Llama of {networks.num_parameters(model) / 1e6:.0f} "
                f"million parameters, {options.batch_size * options.sequence_length} tokens a step",
                _rows(setup, seconds, peaks),
            )
    cost = statistics.median(seconds[ON]) / statistics.median(seconds[OFF])
    recording.summarize(f"a step with all monitors takes {cost:.3f} of one without")


def _rows(
    setup: Setup, seconds: Mapping[str, list[float]], peaks: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return the rows of the kinds that have run, compared as far as both have."""
    rows = []
    for kind in KINDS:
        times, others = seconds[kind], seconds[OFF]
        both = min(len(times), len(others))
        if times:
            rows.append(
                {
                    "monitors": kind,
                    "ms a step": spread([each * 1e3 for each in times]),
                    "of a step without": ratios(times[:both], others[:both]) if both else None,
                    "peak memory, MB": peaks[kind] / 1e6 if setup.on_cuda else None,
                }
            )
    return rows


def _peak_of_run(setup: Setup, call: Callable[[], None]) -> float:
    found = peak_of(setup, call)
    return 0.0 if found is None else found
