"""`MFTrainer` and its monitors do on a GPU what they do on a CPU."""

import json
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from torch import nn
from transformers import Trainer

from mfwrap import DynamicLossScaleUpdateCell
from mfwrap.accelerate import attach
from mfwrap.callbacks import (
    MetricsRecorder,
    MFLossMonitor,
    ProfileMonitor,
    RankClock,
    TrainingStateMonitor,
)
from mfwrap.report.page import write_run_page
from mfwrap.trainer import MFTrainer, MFTrainerMixin
from support.device_runs import LossNetwork, Rows, everything, small_trainer, stacked
from support.devices import each_device
from support.half_precision import StockHalf
from support.trainer_runs import train, values


class Half(MFTrainerMixin, StockHalf):
    """`StockHalf` with MindFormers' step."""


PRECISIONS = {"float32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}


def lines(file):
    """Return the objects of a JSON Lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def kinds(precision, device):
    """Return the class of the stock trainer and ours; a CPU has fp16 only with `StockHalf`."""
    return (StockHalf, Half) if (precision, device) == ("fp16", "cpu") else (Trainer, MFTrainer)


@each_device
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_training_equals_that_of_the_stock_trainer(precision, device, tmp_path):
    """Without clipping, losses and weights equal those of the stock Trainer, bit by bit."""
    data = Rows()
    # Small losses, so that no gradient overflows at the first scale of the stock Trainer, 2**16.
    data._factors.fill_(2.0**-4)
    settings = {"max_steps": 6, "max_grad_norm": 0.0, "logging_strategy": "steps"}
    settings |= {
        "logging_steps": 1,
        "lr_scheduler_type": "cosine",
        "data": data,
        **PRECISIONS[precision],
    }
    stock, ours = (
        train(small_trainer(tmp_path / kind.__name__, device, kind=kind, **settings))
        for kind in kinds(precision, device)
    )

    assert len(values(stock, "loss")) == 6
    assert values(ours, "loss") == values(stock, "loss")
    assert values(ours, "learning_rate") == values(stock, "learning_rate")
    for name, weight in stock.weights.items():
        assert weight.device.type == device
        assert torch.equal(ours.weights[name], weight), name


@each_device
def test_the_gradient_scaler_is_taken_over(device):
    """In fp16, the scale starts and grows as accelerate's scaler would, which scales no longer."""
    if device == "cpu":
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    else:
        settings = GradScalerKwargs(init_scale=2.0**12, growth_interval=3)
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[settings])
    attached = attach(accelerator)
    network = Classified()
    network, optimizer = accelerator.prepare(
        network, torch.optim.AdamW(network.parameters(), 1e-2, fused=True)
    )
    assert next(network.parameters()).device.type == device
    batch = {name: tensor.to(device) for name, tensor in stacked(list(Rows(8))).items()}
    scales = []
    for _ in range(4):
        accelerator.backward(network(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        scales.append(attached.last_output.loss_scale)

    assert [scale.item() for scale in scales] == [2.0**12, 2.0**12, 2.0**13, 2.0**13]
    assert not isinstance(accelerator.scaler, torch.amp.GradScaler)


@each_device
def test_overflows_in_fp16_are_skipped(device, tmp_path):
    """From a scale that is too high, the scale is halved until an update is applied."""
    _, kind = kinds("fp16", device)
    extras = {"scale_sense": DynamicLossScaleUpdateCell(2.0**40, 2, 1000)}
    trainer = small_trainer(tmp_path, device, kind=kind, max_steps=40, extras=extras, fp16=True)
    trainer.train()
    report = trainer.attached.last_report
    skipped, applied = report.skipped_updates.item(), report.applied_updates.item()

    assert 0 < skipped < 40
    assert skipped + applied == 40
    assert report.output.loss_scale.item() == 2.0 ** (40 - skipped)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@each_device
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_whole(workers, device, tmp_path):
    """Losses are those of float64, if batches are pinned and copied without a wait."""
    trainer = small_trainer(
        tmp_path,
        device,
        model=Classified,
        max_steps=6,
        logging_strategy="steps",
        logging_steps=1,
        learning_rate=0.0,
        dataloader_num_workers=workers,
        train_sampling_strategy="sequential",
    )
    losses = values(train(trainer), "loss")
    rows, reference = Rows(), Classified().double()
    reference.load_state_dict(trainer.model.state_dict())
    expected = []
    for first in range(0, 24, 4):
        batch = [rows[index] for index in range(first, first + 4)]
        inputs = torch.stack([row["inputs"] for row in batch]).double()
        labels = torch.stack([row["labels"] for row in batch])
        expected.append(reference(inputs, labels, torch.ones(4).double())["loss"].item())

    assert losses == pytest.approx(expected, rel=1e-4)


class Classified(LossNetwork):
    """A `LossNetwork` without dropout."""

    def __init__(self):
        super().__init__()
        self.layers[2] = nn.Identity()


class Faulty(LossNetwork):
    """A `LossNetwork` whose second layer returns NaN for rows with a factor above 1."""

    def __init__(self):
        super().__init__()
        self.layers[1].register_forward_hook(self._spoil)

    def forward(self, inputs, labels, factors):
        self.marked = (factors > 1).unsqueeze(1)
        return super().forward(inputs, labels, factors)

    def _spoil(self, _module, _inputs, output):
        return torch.where(self.marked, math.nan, output)


@each_device
def test_a_nan_is_found(device, tmp_path):
    """A NaN of one row is skipped, and named by a replay: step, module, micro-batch and row."""
    data = Rows()
    data._factors[21] = 2.0
    monitor = TrainingStateMonitor(folder=tmp_path, replay=True)
    trainer = small_trainer(
        tmp_path,
        device,
        model=Faulty,
        data=data,
        callbacks=[monitor],
        extras=everything(),
        max_steps=12,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    [record] = lines(tmp_path / "anomalies.jsonl")

    # Steps of two micro-batches of two rows: row 21 is the second of the first one of step 6.
    assert (record["step"], record["micro_batch"]) == (6, 0)
    assert (record["where"], record["name"]) == ("activation", "layers.1")
    assert (record["replay"], record["skipped"]) == ("reproduced", True)
    assert [sample["row"] for sample in record["samples"]] == [1]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert trainer.attached.last_report.applied_updates.item() == 11


@each_device
def test_the_page_of_a_run(device, tmp_path):
    """The page of a run names the device, and has the times of the sections of its steps."""
    callbacks = [
        MetricsRecorder(tmp_path),
        TrainingStateMonitor(folder=tmp_path),
        RankClock(2, folder=tmp_path),
    ]
    trainer = small_trainer(
        tmp_path, device, callbacks=callbacks, extras=everything(), max_steps=10
    )
    trainer.train()
    write_run_page([tmp_path], tmp_path / "page.html")

    facts = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    hardware = facts["hardware"]
    if device == "cuda":
        assert (hardware["device"], hardware["name"]) == ("cuda", torch.cuda.get_device_name())
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert hardware["name"] in page.replace("<wbr>", "")
    records = lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 11))


@each_device
def test_a_profile(device, tmp_path):
    """A profile has the operators of the requested steps; on a GPU, also their kernels."""
    monitor = ProfileMonitor(3, 4, tmp_path)
    small_trainer(tmp_path, device, callbacks=[monitor], max_steps=5).train()
    folder = tmp_path / "rank_0"
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]

    assert "aten::mm" in (folder / "operators.txt").read_text(encoding="utf-8")
    assert bool(kernels) == (device == "cuda")


@each_device
def test_the_rate_of_operations(device, tmp_path, caplog):
    """The loss monitor logs the share of the peak rate, which it knows of the usual GPUs."""
    caplog.set_level("INFO")
    named = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    is_known = any(name in named for name in ("H100", "H200", "A100"))
    peak = None if is_known else 100.0
    monitor = MFLossMonitor(count_flops=True, per_print_times=1, peak_tflops=peak)
    small_trainer(tmp_path, device, callbacks=[monitor], max_steps=6).train()
    lines = [each.getMessage() for each in caplog.records if "{ Epoch" in each.getMessage()]

    assert len(lines) == 6
    assert all("mfu: " in line for line in lines[1:])


@each_device
def test_a_compiled_network(device, tmp_path):
    """A network that is compiled trains as one that is not."""
    settings = {"max_steps": 4, "logging_strategy": "steps", "logging_steps": 1}
    settings |= {"model": Classified, "extras": everything()}
    plain = train(small_trainer(tmp_path / "plain", device, **settings))
    settings |= {"torch_compile_backend": "aot_eager", "tf32": False}
    trainer = small_trainer(tmp_path / "compiled", device, **settings)
    # On a GPU, accelerate has turned TF32 on for a compiled network, whatever `tf32` says.
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    compiled = train(trainer)

    assert values(compiled, "loss") == pytest.approx(values(plain, "loss"), rel=1e-5)
    norms = values(compiled, "grad_norm"), values(plain, "grad_norm")
    assert len(norms[1]) == 4
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
