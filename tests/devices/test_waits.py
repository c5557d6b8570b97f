"""A step does not synchronize with the device, and the host runs ahead of it.

torch's debug mode sees copies and reads that wait, but not waits for events. The tests with
`occupied` see both: the host must come back while the device is still busy.
"""

import collections
import functools

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback

from mfwrap import (
    AdamWeightDecay,
    ChainedOptimizer,
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    Model,
    StepConfig,
)
from mfwrap.accelerate import attach
from mfwrap.callbacks import (
    Callback,
    EMACallback,
    LocalNormMonitor,
    LossMonitor,
    MetricsRecorder,
    MFLossMonitor,
    RankClock,
    ReplicaCheck,
    TimeMonitor,
    TrainingStateMonitor,
)
from mfwrap.tensors.deferred import DeferredReads
from mfwrap.trainer import MFTrainer
from support.device_runs import everything, small_trainer
from support.devices import each_device, occupied, refused_waits, seen_waits
from support.small_networks import Classifier, labelled_batches
from support.trainer_runs import Counting, padded, tiny_llama
from support.versions import needs

# On a CPU the results of an update are known at once; let them arrive late, as on a device.
pytestmark = pytest.mark.usefixtures("_late_results")

NAN = float("nan")
TRIES = 3
"""Steps that are tried while the device is busy. One of them may wait for an allocation of the
driver; a step that waits for the device waits in all of them."""


def fused_adamw(parameters):
    """Return AdamW, which skips on the device."""
    return torch.optim.AdamW(parameters, 1e-2, fused=True)


def chained(parameters):
    """Return one optimizer for matrices and another one for biases."""
    parameters = list(parameters)
    return ChainedOptimizer(
        AdamWeightDecay([p for p in parameters if p.ndim == 2], 1e-2),
        torch.optim.SGD([p for p in parameters if p.ndim != 2], 0.1, momentum=0.9, fused=True),
    )


class OwnLoop:
    """A cell with everything on, and one batch on its device.

    Args:
        device: Training device.
        make_optimizer: Makes the optimizer from the parameters.
        dtype: Dtype of the weights. The averages are in float32.
        settings: Further settings of the cell.
    """

    def __init__(self, device, make_optimizer=None, dtype=torch.float32, **settings):
        self.network = Classifier().to(device, dtype)
        self.optimizer = (make_optimizer or fused_adamw)(self.network.parameters())
        self.cell = MFTrainOneStepCell(
            self.network,
            self.optimizer,
            use_clip_grad=True,
            scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 3),
            local_norm=True,
            lr_scheduler=LambdaLR(self.optimizer, lambda step: 1 / (1 + step)),
            ema=ExponentialMovingAverage(self.network, 0.9, warmup=True, dtype=torch.float32),
            **settings,
        )
        [(inputs, labels)] = labelled_batches(1)
        self.batch = inputs.to(device, dtype), labels.to(device)
        self.factors = {x: torch.full((), x, device=device) for x in (1.0, NAN)}

    def step(self, factor=1.0):
        return self.cell(*self.batch, self.factors[factor])


class AttachedLoop(OwnLoop):
    """The same step behind accelerate."""

    def __init__(self, device):
        self.accelerator = Accelerator(cpu=device == "cpu")
        self.attached = attach(
            self.accelerator,
            StepConfig(use_clip_grad=True, local_norm=True),
            lambda network: ExponentialMovingAverage(network, 0.9, warmup=True),
            scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 3),
        )
        network = Classifier()
        optimizer = torch.optim.AdamW(network.parameters(), 1e-2, fused=True)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.network, self.optimizer, self.schedule = self.accelerator.prepare(
            network, optimizer, schedule
        )
        assert next(self.network.parameters()).device.type == device
        [batch] = labelled_batches(1)
        self.batch = tuple(tensor.to(device) for tensor in batch)
        self.factors = {x: torch.full((), x, device=device) for x in (1.0, NAN)}

    def step(self, factor=1.0):
        self.accelerator.backward(self.network(*self.batch, self.factors[factor]))
        self.accelerator.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return self.attached.last_output


LOOPS = {
    "cell": OwnLoop,
    "accumulation": functools.partial(OwnLoop, gradient_accumulation_steps=2),
    "spikes": functools.partial(OwnLoop, spike_policy="skip"),
    "chain": functools.partial(OwnLoop, make_optimizer=chained),
    "bfloat16": functools.partial(
        OwnLoop,
        dtype=torch.bfloat16,
        gradient_accumulation_steps=2,
        accumulate_allreduce_grads_in_fp32=True,
    ),
    "attach": AttachedLoop,
}
each_loop = pytest.mark.parametrize(
    "loop",
    [
        pytest.param(
            loop,
            id=name,
            marks=needs("torch", "2.10", "Tensor.grad_dtype") if name == "bfloat16" else (),
        )
        for name, loop in LOOPS.items()
    ],
)


@each_device
@each_loop
def test_a_step_reads_nothing(loop, device):
    """No step reads on the host, whether it is applied or skipped."""
    trained = loop(device)
    trained.step()
    with refused_waits(device):
        outputs = [trained.step(factor) for factor in (1.0, NAN, 1.0, NAN)]

    assert [output.overflow.item() for output in outputs] == [False, True, False, True]


@each_device
def test_a_scale_that_the_loop_sets(device):
    """A scale from the host or from the device is set without a wait."""
    trained = OwnLoop(device)
    scales = [torch.full((), 4.0), torch.full((1,), 16.0, device=device)]
    found = []
    trained.step(NAN)
    with refused_waits(device):
        for scale in scales:
            trained.cell.set_sense_scale(scale)
            found.append(trained.step().loss_scale)

    assert [scale.item() for scale in found] == [4.0, 16.0]


@pytest.mark.cuda
@each_loop
def test_a_step_returns_while_the_device_is_busy(loop):
    """The host queues a step and goes on, although the device has not begun with it."""
    trained = loop("cuda")
    for factor in (1.0, NAN, 1.0):
        trained.step(factor)

    ahead = []
    for _ in range(TRIES):
        done = occupied()
        trained.step()
        ahead.append(not done.query())

    assert any(ahead)


@pytest.mark.cuda
@each_loop
def test_the_last_results_are_awaited_behind_the_backward(loop):
    """The host waits for the results of an update when the next backward is queued, and not before.

    While the device is busy, one step is queued, and then the forward and the backward of the next
    one. The host gets so far without a wait. It comes back from the second step only when the first
    one is done, because the rate of the second needs the result of the first.
    """
    trained = loop("cuda")
    for factor in (1.0, NAN, 1.0):
        trained.step(factor)
    done = []
    weight = trained.network.layers[0].weight

    def note(*_):
        if done:
            ahead.append(not done[-1].query())

    ahead = []
    weight.register_post_accumulate_grad_hook(note)
    ends = []
    for _ in range(TRIES):
        done.append(occupied())
        trained.step()
        ahead.clear()
        trained.step()
        ends.append((all(ahead) and len(ahead) > 0, done[-1].query()))

    assert (True, True) in ends
    assert all(reached for _, reached in ends)


def test_on_a_cpu_they_are_read_behind_the_backward(monkeypatch):
    """The results of a step are read in the next step, after its backward."""
    trained, order = OwnLoop("cpu"), []
    trained.step()
    trained.network.layers[0].weight.register_post_accumulate_grad_hook(
        lambda _: order.append("backward")
    )
    flush = DeferredReads.flush

    def noted(reads, **keywords):
        if len(reads):
            order.append("read")
        flush(reads, **keywords)

    monkeypatch.setattr(DeferredReads, "flush", noted)
    trained.step()

    assert order == ["backward", "read"]


class Window(TrainerCallback):
    """Collect what the host waits for from the end of the third step to that of the eighth."""

    def __init__(self, device):
        self._device = device
        self.waits = []

    def on_step_end(self, _args, state, *_, **__):
        if state.global_step == 3:
            self._context = seen_waits(self._device)
            self.waits = self._context.__enter__()
        if state.global_step == 8:
            self._context.__exit__(None, None, None)


def waits_of(kind, folder, device, *, callbacks=(), **settings):
    """Train eight steps; count what the host waited for in the last five."""
    window = Window(device)
    trainer = small_trainer(
        folder, device, kind=kind, callbacks=[*callbacks, window], max_steps=8, **settings
    )
    trainer.train()
    return collections.Counter(window.waits)


EVERY_RECORD = {
    f"{name}_format": ["jsonl"]
    for name in ("local_norm", "device_local_norm", "local_loss", "optimizer_state", "weight_state")
}
MONITORS = {
    "no monitor": lambda _: [],
    "every record": lambda folder: [
        TrainingStateMonitor(folder=folder, replay=True, **EVERY_RECORD)
    ],
    "MFLossMonitor": lambda _: [MFLossMonitor()],
    "TrainingStateMonitor": lambda folder: [TrainingStateMonitor(folder=folder, replay=True)],
    "LocalNormMonitor": lambda folder: [LocalNormMonitor(folder=folder)],
    "MetricsRecorder": lambda folder: [MetricsRecorder(folder)],
    "RankClock": lambda _: [RankClock()],
    "ReplicaCheck": lambda folder: [ReplicaCheck(3, gradients=True, folder=folder)],
    "EMACallback": lambda _: [EMACallback()],
}


@each_device
@pytest.mark.parametrize("monitors", MONITORS.values(), ids=MONITORS)
def test_mftrainer_waits_for_nothing_more(monitors, device, tmp_path):
    """With everything on, `MFTrainer` waits for nothing beside what the stock Trainer waits for."""
    stock = waits_of(Trainer, tmp_path / "stock", device)
    ours = waits_of(MFTrainer, tmp_path, device, callbacks=monitors(tmp_path), extras=everything())

    assert ours - stock == collections.Counter()


TRANSFORMER = {
    "model": tiny_llama,
    "data": Counting(64, length=8),
    "accelerator_config": {"non_blocking": False},
}
"""A model of transformers, whose forward waits, and which is told the number of targets."""


@each_device
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_mftrainer_waits_for_nothing_more_with_a_transformer(precision, device, tmp_path):
    """With a model of transformers and its attention logits, `MFTrainer` waits for nothing more."""
    settings = TRANSFORMER | precision
    collator = {"data_collator": padded}
    monitor = TrainingStateMonitor(
        folder=tmp_path, replay=True, max_attention_logit_format=["jsonl"]
    )
    stock = waits_of(Trainer, tmp_path / "stock", device, extras=collator, **settings)
    ours = waits_of(
        MFTrainer, tmp_path, device, callbacks=[monitor], extras=everything() | collator, **settings
    )

    assert sum(ours.values()) > 0
    assert ours - stock == collections.Counter()


@each_device
def test_the_stock_trainer_waits(device, tmp_path):
    """The counter of the test above sees the waits of the stock Trainer's filter of losses."""
    assert sum(waits_of(Trainer, tmp_path, device).values()) >= 10


# Fingerprints read the state of the host's generator, which counts as a wait on a CPU.
WITH_FINGERPRINTS = MONITORS | {
    "fingerprints": lambda folder: [TrainingStateMonitor(folder=folder, fingerprints=True)]
}


class Ahead(TrainerCallback):
    """Keep the device busy from some step ends on, and tell whether the next step ends earlier."""

    def __init__(self):
        self.found = []
        self._done = None

    def on_step_end(self, _args, state, *_, **__):
        if self._done is not None:
            self.found.append(not self._done.query())
        self._done = occupied() if state.global_step in {4, 6, 8} else None


@pytest.mark.cuda
@pytest.mark.parametrize("monitors", WITH_FINGERPRINTS.values(), ids=WITH_FINGERPRINTS)
def test_a_step_of_mftrainer_ends_while_the_device_is_busy(monitors, tmp_path):
    """The host runs ahead of the device in `MFTrainer`, with each monitor."""
    ahead = Ahead()
    small_trainer(
        tmp_path,
        "cuda",
        callbacks=[*monitors(tmp_path), ahead],
        extras=everything(),
        max_steps=10,
    ).train()

    assert len(ahead.found) == TRIES
    assert any(ahead.found)


class ModelWaits(Callback):
    """Collect what the host waits for in the steps of a `Model` from the third on."""

    def __init__(self, device):
        self._device, self._number = device, 0
        self.waits = []

    def on_train_step_begin(self, run_context):
        self._number += 1
        if self._number > 2:
            self._context = seen_waits(self._device)
            self._waits = self._context.__enter__()

    def on_train_step_end(self, run_context):
        if self._number > 2:
            self._context.__exit__(None, None, None)
            self.waits += self._waits


@each_device
def test_model_waits_for_nothing(device):
    """Steps of `Model` with MindSpore's monitors wait for nothing."""
    if device == "cpu":
        Accelerator(cpu=True)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2, fused=True)
    pin = (lambda batch: batch) if device == "cpu" else (lambda b: [x.pin_memory() for x in b])
    watch = ModelWaits(device)
    callbacks = [LossMonitor(per_print_times=100), TimeMonitor(), EMACallback(0.9), watch]
    model = Model(network, nn.CrossEntropyLoss(), optimizer, amp_level="O2")

    model.train(
        1,
        [pin(batch) for batch in labelled_batches(6)],
        callbacks=callbacks,
        dataset_sink_mode=True,
    )

    assert next(network.parameters()).device.type == device
    assert watch.waits == []
