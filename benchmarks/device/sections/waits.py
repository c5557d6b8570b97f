"""Synchronizations of whole steps with the device.

CUDA's synchronization debug mode warns at each call that waits for the device. It does not see
waits for events, which the deferred reads use on purpose: the last part shows that the device still
has work when such a wait ends.
"""

import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from device import networks, ways
from device.environment import FOLDER
from device.recording import Recording
from device.setup import Setup
from mfwrap import ExponentialMovingAverage, Model, StepConfig
from mfwrap.callbacks import (
    Callback,
    EMACallback,
    EvalCallback,
    LocalNormMonitor,
    LossMonitor,
    MemoryMonitor,
    MetricsRecorder,
    MFLossMonitor,
    RankClock,
    ReplicaCheck,
    TimeMonitor,
    TrainingStateMonitor,
)
from mfwrap.tensors.deferred import DeferredReads
from mfwrap.trainer import MFTrainer

SETTLED = 11
"""Updates before the watched ones: monitors have taken their first sample of the tenth by then."""
WATCHED = 8
"""Watched updates; the twentieth, in which monitors take a sample again, is not one of them."""

MESSAGE = "synchronizing CUDA operation"


class Waits:
    """Calls in which the host has waited for the device.

    Args:
        setup: Device; on a CPU nothing is found.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._steps = 0
        self._caught: Any = None
        self.found: list[Wait] = []

    def start(self) -> None:
        """Watch this thread and, as far as torch passes warnings on, the others."""
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._show
        if self._setup.on_cuda:
            torch.cuda.set_sync_debug_mode("warn")
            self.found.clear()  # the mode's own warning that it is a prototype

    def stop(self, steps: int) -> None:
        """Stop to watch after a number of steps."""
        self._steps += steps
        self.close()

    def close(self) -> None:
        """Stop to watch, if that is still to be done."""
        if self._caught is not None:
            if self._setup.on_cuda:
                torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self._caught = None

    def _show(self, message: Any, *_: Any, **__: Any) -> None:
        if MESSAGE in str(message):
            self.found.append(wait_at(traceback.extract_stack(sys._getframe(1))))

    def columns(self, way: str) -> dict[str, Any]:
        """Return the row of a table."""
        counts = Counter(wait.place for wait in self.found)
        ours = sum(wait.is_ours for wait in self.found)
        steps = self._steps if self._setup.on_cuda else 0
        return {
            "whole steps of": way,
            "steps": self._steps,
            "waits a step": len(self.found) / steps if steps else None,
            "by mfwrap": ours / steps if steps else None,
            "places": "; ".join(f"{count} x {place}" for place, count in counts.most_common(6)),
        }


TREE = str(FOLDER / "tree")
LIBRARIES = (TREE, "/transformers/", "/accelerate/")


class Wait(NamedTuple):
    """A call that has waited for the device."""

    place: str
    """The innermost line, and the two innermost ones of mfwrap, transformers or accelerate."""

    is_ours: bool
    """Whether the innermost line of these three libraries is mfwrap's."""


def wait_at(stack: Sequence[traceback.FrameSummary]) -> Wait:
    """Return where the innermost function of a stack waits."""
    lines: list[str] = []
    by_library: list[bool] = []
    for frame in reversed(stack):
        if Path(frame.filename).stem in {"warnings", "_py_warnings"}:  # Python passes it on
            continue
        if frame.name == "__torch_function__":  # mfwrap watches the calls of others in it
            continue
        is_library = any(part in frame.filename for part in LIBRARIES)
        by_library += [TREE in frame.filename] if is_library else []
        if is_library or not lines:
            lines.append(f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}")
    return Wait(" < ".join(lines[:3]), bool(by_library) and by_library[0])


def measure(recording: Recording, setup: Setup) -> None:
    """Watch whole steps of each way into mfwrap, and of the stock Trainer beside them."""
    rows: dict[str, dict[str, Any]] = {}
    for name, watch in WATCHES.items():
        with recording.part(name):
            waits = Waits(setup)
            try:
                watch(setup, waits)
            finally:
                waits.close()
            rows[name] = waits.columns(name)
            recording.row("synchronizations", rows[name])
            if setup.on_cuda and name != STOCK:
                recording.check(
                    f"mfwrap waits for nothing: {name}",
                    holds=rows[name]["by mfwrap"] == 0,
                    found=rows[name]["places"] or "none",
                )
    with recording.part("deferred reads"):
        _deferred_reads(recording, setup)
    counts = [f"{name} {row['waits a step']}" for name, row in rows.items()]
    recording.summarize(f"waits a step: {', '.join(counts)}" if setup.on_cuda else "not on a CPU")


def _small_llama(setup: Setup) -> nn.Module:
    width, layers = setup.size((256, 2), (32, 1))
    return networks.llama(setup, width, layers, vocabulary=512, length=64)


def _watched(setup: Setup, waits: Waits, step: Callable[[], object]) -> None:
    for _ in range(SETTLED):
        step()
    waits.start()
    for _ in range(WATCHED):
        step()
    waits.stop(WATCHED)
    if setup.on_cuda and not waits.found:
        # A warning from a thread that Python does not know would be lost; an error is not.
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(WATCHED):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _cell(setup: Setup, waits: Waits) -> None:
    network = _small_llama(setup)
    batch = networks.tokens(setup, 4, 64, 512)
    cell = ways.full_cell(
        network,
        gradient_accumulation_steps=2,
        ema=ExponentialMovingAverage(network, 0.9, warmup=True),
        spike_policy="clip",
    )
    _watched(setup, waits, lambda: cell(**batch))


def _attach(setup: Setup, waits: Waits) -> None:
    ways.forget_accelerators()
    batch = networks.tokens(setup, 4, 64, 512)
    _watched(setup, waits, ways.attached_with_everything(setup, _small_llama(setup), batch))


class _Watching(TrainerCallback):
    """Watch the updates of a Trainer, with the loading of their data, but not its logs."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step == SETTLED:
            self._waits.start()
        elif state.global_step == SETTLED + WATCHED:
            self._waits.stop(WATCHED)


def _train(
    setup: Setup,
    waits: Waits,
    kind: type[Trainer],
    callbacks: Callable[[Path], list[TrainerCallback]],
    **settings: Any,
) -> None:
    ways.forget_accelerators()
    batch = networks.tokens(Setup("cpu", small=True), 4 * (SETTLED + WATCHED + 1), 64, 512)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=SETTLED + WATCHED,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            optim="adamw_torch_fused",
            logging_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            use_cpu=not setup.on_cuda,
            dataloader_pin_memory=setup.on_cuda,
        )
        trainer = kind(
            _small_llama(setup),
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in batch["input_ids"]],
            callbacks=[*callbacks(Path(folder)), _Watching(waits)],
            **settings,
        )
        trainer.train()


def _settings() -> dict[str, Any]:
    return {
        "step": StepConfig(local_norm=True, local_norm_groups="layer"),
        "ema": lambda network: ExponentialMovingAverage(network, 0.9),
        "scale_sense": ways.dynamic_scale(),
    }


def _stock(setup: Setup, waits: Waits) -> None:
    _train(setup, waits, Trainer, lambda _: [])


def _trainer(setup: Setup, waits: Waits) -> None:
    def usual(folder: Path) -> list[TrainerCallback]:
        return [
            MFLossMonitor(per_print_times=1000),
            TrainingStateMonitor(folder=folder, replay=True),
            LocalNormMonitor(folder=folder),
            RankClock(),
        ]

    _train(setup, waits, MFTrainer, usual, **_settings())


def _every_monitor(setup: Setup, waits: Waits) -> None:
    formats = ["jsonl"]
    outputs: dict[str, Any] = {
        f"{name}_format": formats
        for name in (
            *("local_norm", "device_local_norm", "local_loss", "device_local_loss"),
            *("optimizer_state", "weight_state", "max_attention_logit"),
        )
    }

    def every(folder: Path) -> list[TrainerCallback]:
        return [
            MetricsRecorder(folder),
            MemoryMonitor(1),
            TrainingStateMonitor(
                folder=folder,
                replay=True,
                fingerprints=True,
                stable_rank_config={"format": formats, "step_interval": 4, "target": ["q_proj"]},
                **outputs,
            ),
            EvalCallback(lambda: {"answer": 42}, step_interval=5),
            ReplicaCheck(3, gradients=True, folder=folder),
        ]

    _train(setup, waits, MFTrainer, every, **_settings())


def _model(setup: Setup, waits: Waits) -> None:
    ways.forget_accelerators()
    Accelerator(cpu=not setup.on_cuda)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(setup.device)
    rows = torch.randn(SETTLED + WATCHED, 3, 4)
    data = [(batch, batch.argmax(1) % 2) for batch in rows]
    if setup.on_cuda:
        data = [(inputs.pin_memory(), labels.pin_memory()) for inputs, labels in data]
    numbers = iter(range(1, SETTLED + WATCHED + 1))

    class Watching(Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            del run_context
            number = next(numbers)
            if number == SETTLED:
                waits.start()
            elif number == SETTLED + WATCHED:
                waits.stop(WATCHED)

    model = Model(network, nn.CrossEntropyLoss(), ways.adamw(network))
    monitors: list[Any] = [
        EMACallback(0.9),
        TimeMonitor(),
        LossMonitor(per_print_times=1000),
        Watching(),
    ]
    model.train(1, data, callbacks=monitors)


STOCK = "stock Trainer"
WATCHES: dict[str, Callable[[Setup, Waits], None]] = {
    "cell": _cell,
    "attach": _attach,
    STOCK: _stock,
    "MFTrainer": _trainer,
    "MFTrainer, every other monitor": _every_monitor,
    "Model": _model,
}


def _deferred_reads(recording: Recording, setup: Setup) -> None:
    """Time the waits of deferred reads in steps that the device needs longer for than the host."""
    width, layers, length = setup.size((768, 12, 512), (32, 1, 32))
    network = networks.llama(setup, width, layers, vocabulary=4096, length=length)
    batch = networks.tokens(setup, setup.size(8, 2), length, 4096)
    cell = ways.full_cell(network)
    waited: list[float] = []
    was_busy: list[bool] = []
    flush = DeferredReads.flush

    def timed(self: DeferredReads, *, waits: bool = True) -> None:
        start = time.perf_counter()
        flush(self, waits=waits)
        waited.append(time.perf_counter() - start)
        was_busy.append(setup.on_cuda and not torch.cuda.current_stream().query())

    steps = setup.size(20, 4)
    for _ in range(5):
        cell(**batch)
    setup.synchronize()
    DeferredReads.flush = timed  # type: ignore[method-assign]  # (the one place where the host waits)
    start = time.perf_counter()
    try:
        for _ in range(steps):
            cell(**batch)
        queued = time.perf_counter() - start
        setup.synchronize()
        whole = time.perf_counter() - start
    finally:
        DeferredReads.flush = flush  # type: ignore[method-assign]  # (as it was)
    recording.row(
        "deferred reads",
        {
            "network": f"Llama of {networks.num_parameters(network) / 1e6:.0f} million",
            "step, ms": whole / steps * 1e3,
            "queued by the host after, ms": queued / steps * 1e3,
            "host waits for the read, ms": statistics.median(waited) * 1e3,
            "device busy after the read": f"{sum(was_busy)} of {len(was_busy)}"
            if setup.on_cuda
            else None,
        },
    )
