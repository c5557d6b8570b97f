"""Ways into mfwrap on the simulated device: their numbers, and what the host waits for."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

from mfwrap import (
    AdamWeightDecay,
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    Model,
    StepConfig,
)
from mfwrap.accelerate import attach
from mfwrap.callbacks import (
    CheckpointMonitor,
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
from mfwrap.trainer import MFTrainer
from support.device.clocks import Watch
from support.device.device import Device

__all__ = ["attached_loops", "found"]

STEPS = 14
"""Number of updates: more than the tenth, at which monitors take a sample."""

SETTLED = 11
"""Number of the update from which on the monitors have set up what they need."""

_OF_TRANSFORMERS = "transformers/"


class Steps:
    """What happens in each update of a training.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.watches: list[Watch] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self.device.watching() as watch:
            yield
        self.watches.append(watch)

    def found(self) -> dict[str, Any]:
        """Return what is not transformers' own doing, once the training has settled."""
        settled = self.watches[SETTLED:]

        def ours(name: str) -> list[str]:
            entries = [each for watch in settled for each in getattr(watch, name)]
            return [each for each in entries if _OF_TRANSFORMERS not in each]

        return {
            "updates": len(self.watches),
            "faults": [str(fault) for watch in self.watches for fault in watch.faults],
            "reads": ours("reads"),
            "synchronizations": ours("synchronizations"),
            "waits": ours("waits"),
        }


def llama(device: torch.device) -> LlamaForCausalLM:
    """Return a small Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    network = LlamaForCausalLM(config)
    network.to(device)  # type: ignore[arg-type]  # (transformers wraps `to` without its types)
    return network


def batches(device: torch.device) -> list[Tensor]:
    """Return the tokens of each update."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (4, 8), generator=generator).to(device) for _ in range(STEPS)]


def dynamic_scale() -> DynamicLossScaleUpdateCell:
    return DynamicLossScaleUpdateCell(1024.0, 2, 3)


def norms_and_weights(reports: list[Any], network: nn.Module) -> list[float]:
    """Return the losses and norms of all updates, and the sizes of the weights after them."""
    values = [value for report in reports for value in (report.loss, report.global_norm)]
    values += [weight.norm() for weight in network.parameters()]
    return [float(value.detach()) for value in values]


def cell(device: torch.device, steps: Steps) -> list[float]:
    """Train with the cell: accumulation, clipping, scale, schedule, average and norms."""
    return _with_cell(llama(device), device, steps)


def hook(device: torch.device, steps: Steps) -> list[float]:
    """Train with the cell and DistributedDataParallel on one rank, whose hook takes the norms."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        return _with_cell(DistributedDataParallel(llama(device)), device, steps)
    finally:
        distributed.destroy_process_group()


def _with_cell(network: nn.Module, device: torch.device, steps: Steps) -> list[float]:
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2, fused=True)
    trained = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        scale_sense=dynamic_scale(),
        local_norm=True,
        gradient_accumulation_steps=2,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
        ema=ExponentialMovingAverage(network, 0.9, warmup=True),
        spike_policy="clip",
    )
    outputs = []
    for tokens in batches(device):
        with steps.watching():
            outputs.append(trained(input_ids=tokens, labels=tokens))
    return norms_and_weights(outputs, network)


def _accelerator(device: torch.device) -> Accelerator:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ["ACCELERATE_TORCH_DEVICE"] = device.type
    return Accelerator()


def attached(device: torch.device, steps: Steps) -> list[float]:
    """Train with an attached accelerate loop."""
    accelerator = _accelerator(device)
    step = attach(
        accelerator,
        StepConfig(local_norm=True, use_clip_grad=True),
        lambda network: ExponentialMovingAverage(network, 0.9),
        scale_sense=dynamic_scale(),
    )
    # Moved to this device, a parameter is a new object, so move the network before the optimizer.
    network = llama(device)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    network, prepared, schedule = accelerator.prepare(network, optimizer, schedule)
    outputs = []
    for tokens in batches(device):
        with steps.watching():
            accelerator.backward(network(input_ids=tokens, labels=tokens).loss)
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            prepared.step()
            schedule.step()
            prepared.zero_grad()
        outputs.append(step.last_output)
    return norms_and_weights(outputs, network)


class _Watching(TrainerCallback):
    """Watch each update; the last callback, so that it sees what the monitors do."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._context = self._steps.watching()
        self._context.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._context.__exit__(None, None, None)


def trainer(device: torch.device, steps: Steps) -> list[float]:
    """Train with MFTrainer and its usual monitors."""
    return _trained(
        device,
        steps,
        lambda folder: [
            MFLossMonitor(),
            TrainingStateMonitor(folder=folder, replay=True),
            LocalNormMonitor(folder=folder),
            RankClock(),
        ],
    )


FORMATS = ["jsonl"]
EVERY_OUTPUT: dict[str, Any] = {
    **{
        f"{name}_format": FORMATS
        for name in (
            *("local_norm", "device_local_norm", "local_loss", "device_local_loss"),
            *("optimizer_state", "weight_state", "max_attention_logit"),
        )
    },
    "stable_rank_config": {"format": FORMATS, "step_interval": 4, "target": ["q_proj"]},
    "throughput_baseline": 1.0,
    "fingerprints": True,
}


def monitors(device: torch.device, steps: Steps) -> list[float]:
    """Train with MFTrainer and every other monitor and output, and save checkpoints."""
    return _trained(
        device,
        steps,
        lambda folder: [
            MetricsRecorder(folder),
            MemoryMonitor(1),
            TrainingStateMonitor(folder=folder, replay=True, **EVERY_OUTPUT),
            EvalCallback(lambda: {"answer": 42}, step_interval=5),
            ReplicaCheck(3, gradients=True, folder=folder),
            CheckpointMonitor(5),
        ],
    )


def _trained(
    device: torch.device, steps: Steps, callbacks: Callable[[Path], list[TrainerCallback]]
) -> list[float]:
    _accelerator(device)
    tokens = torch.cat(batches(torch.device("cpu")))
    outputs: list[Any] = []

    class Outputs(TrainerCallback):
        def on_step_end(self, *_: Any, step_output: Any = None, **__: Any) -> None:
            outputs.append(step_output)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            optim="adamw_torch_fused",
            logging_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            dataloader_pin_memory=device.type != "cpu",
        )
        trained = MFTrainer(
            llama(torch.device("cpu")),
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[Outputs(), *callbacks(Path(folder)), _Watching(steps)],
            step=StepConfig(local_norm=True, local_norm_groups="layer"),
            ema=lambda network: ExponentialMovingAverage(network, 0.9),
            scale_sense=dynamic_scale(),
        )
        trained.train()
        return norms_and_weights(outputs, trained.model)


def model(device: torch.device, steps: Steps) -> list[float]:
    """Train with MindSpore's `Model` and its callbacks."""
    _accelerator(device)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    rows = torch.randn(STEPS, 3, 4)
    data = [(batch, batch.argmax(1) % 2) for batch in rows]
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2, fused=True)

    class Watching(LossMonitor):
        def on_train_step_begin(self, run_context: Any) -> None:
            self._context = steps.watching()
            self._context.__enter__()
            super().on_train_step_begin(run_context)

        def on_train_step_end(self, run_context: Any) -> None:
            super().on_train_step_end(run_context)
            self._context.__exit__(None, None, None)

    trained = Model(network, nn.CrossEntropyLoss(), optimizer)
    watching = Watching(per_print_times=1000)
    trained.train(1, data, callbacks=[EMACallback(0.9), TimeMonitor(), watching])
    return [float(weight.detach().norm()) for weight in network.parameters()]


WAYS: dict[str, Callable[[torch.device, Steps], list[float]]] = {
    "cell": cell,
    "DDP": hook,
    "attach": attached,
    "MFTrainer": trainer,
    "every monitor": monitors,
    "Model": model,
}


def found() -> dict[str, Any]:
    """Train in each way on the device and on the CPU.

    Returns:
        By way: what happened on the device, ``numbers`` on the device, and ``expected`` ones.
    """
    device = Device()
    result = {}
    for name, way in WAYS.items():
        steps = Steps(device)
        numbers = way(device.device, steps)
        expected = way(torch.device("cpu"), Steps(device))
        result[name] = {**steps.found(), "numbers": numbers, "expected": expected}
    return result


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "AdamWeightDecay": lambda weights: AdamWeightDecay(weights, lr=0.1),
    "fused SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, foreach=True),
}
FACTORS = (1.0, 1.0, float("nan"), 1.0, float("nan"), 1.0)
"""Factors of the losses of successive updates."""


def _loop(optimizer: str, device: torch.device, steps: Steps, *, asks: bool) -> dict[str, Any]:
    accelerator = _accelerator(device)
    step = attach(
        accelerator,
        StepConfig(local_norm=True, use_clip_grad=True),
        lambda network: ExponentialMovingAverage(network, 0.9),
        scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 2),
    )
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    inner = OPTIMIZERS[optimizer](network.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    network, prepared, schedule = accelerator.prepare(network, inner, schedule)
    batches = [(torch.ones(3, 2).to(device), torch.tensor(f).to(device)) for f in FACTORS]
    rates, asking = [], Steps(steps.device)
    for inputs, factor in batches:
        with steps.watching():
            accelerator.backward(network(inputs).square().mean() * factor)
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            prepared.step()
            rates.append(inner.param_groups[0]["lr"])
            schedule.step()
            prepared.zero_grad()
        if asks:
            with asking.watching():
                schedule.get_last_lr()
    step.flush()
    return {
        "faults": [str(fault) for watch in steps.watches for fault in watch.faults],
        "reads": [len(watch.reads) for watch in steps.watches],
        "waits": [len(watch.waits) for watch in steps.watches],
        "asking": [len(watch.waits) for watch in asking.watches],
        "rates": [*rates, inner.param_groups[0]["lr"]],
    }


def attached_loops() -> dict[str, Any]:
    """Train attached loops, some of which ask for the rate after each update.

    Returns:
        By optimizer and way of asking, one value for each update: ``reads`` and ``waits`` on the
        device, ``asking``, the waits of the questions, and the ``rates`` that updates used, with
        those on a CPU as ``expected``; and all ``faults``.
    """
    device, result = Device(), {}
    for optimizer in OPTIMIZERS:
        for asks in (False, True):
            found = _loop(optimizer, device.device, Steps(device), asks=asks)
            on_cpu = _loop(optimizer, torch.device("cpu"), Steps(device), asks=asks)
            name = f"{optimizer}, {'asked' if asks else 'not asked'}"
            result[name] = {**found, "expected": on_cpu["rates"]}
    return result
