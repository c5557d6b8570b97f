"""Contestants of trainer.py: ways to run a whole training step."""

import abc
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    StepConfig,
)
from mfwrap.accelerate import attach
from mfwrap.callbacks import MFLossMonitor
from mfwrap.trainer import MFTrainer

DECAY = 0.999
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
WARMUP = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """The model, data and sizes that every contestant trains with."""

    model: nn.Module
    tokens: Tensor
    folder: str
    device: str
    batch_size: int
    accumulation: int
    steps: int
    logging_steps: int = 5
    """Updates after which each contestant reads its loss on the host."""

    precision: Literal["no", "bf16"] = "no"
    """Precision of forward and backward; weights are in float32."""

    def dataset(self) -> list[dict[str, Tensor]]:
        """Return one sample per sequence."""
        return [{"input_ids": row, "labels": row} for row in self.tokens]

    def loader(self) -> DataLoader[dict[str, Tensor]]:
        """Return a loader of micro-batches, in random order."""
        dataset: Any = self.dataset()
        return DataLoader(dataset, self.batch_size, shuffle=True, pin_memory=self.device == "cuda")

    def accelerator(self) -> Accelerator:
        """Return an accelerator for loops."""
        return Accelerator(
            cpu=self.device == "cpu",
            gradient_accumulation_steps=self.accumulation,
            mixed_precision=self.precision,
        )


class Contestant(abc.ABC):
    """One way to train."""

    name: str

    @abc.abstractmethod
    def train(self, setting: Setting, step_done: Callable[[], None]) -> None:
        """Train, and call `step_done` at the end of each update."""


def _dynamic_scale() -> DynamicLossScaleUpdateCell:
    return DynamicLossScaleUpdateCell(65536, 2, 2000)


class _EndOfStep(TrainerCallback):
    def __init__(self, step_done: Callable[[], None]) -> None:
        self._step_done = step_done

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._step_done()


def _arguments(setting: Setting) -> TrainingArguments:
    return TrainingArguments(
        setting.folder,
        max_steps=setting.steps,
        per_device_train_batch_size=setting.batch_size,
        gradient_accumulation_steps=setting.accumulation,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        use_cpu=setting.device == "cpu",
        bf16=setting.precision == "bf16",
        logging_steps=setting.logging_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def _train(trainer: Trainer, step_done: Callable[[], None]) -> None:
    trainer.add_callback(_EndOfStep(step_done))
    trainer.remove_callback(PrinterCallback)
    trainer.train()


class Stock(Contestant):
    """Use transformers' Trainer as it is: no norms by parameter, no average."""

    name = "stock Trainer"

    def train(self, setting: Setting, step_done: Callable[[], None]) -> None:
        trainer = Trainer(setting.model, _arguments(setting), train_dataset=setting.dataset())
        _train(trainer, step_done)


class _NormsByHand(TrainerCallback):
    """Read the norm of each gradient on the host, one by one, as forums usually recommend."""

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.norms = {
            name: parameter.grad.norm().item()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }


class _AverageByHand(TrainerCallback):
    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        average = get_ema_multi_avg_fn(DECAY)
        self.average = AveragedModel(model, multi_avg_fn=average)

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.average.update_parameters(model)


class StockWithCallbacks(Contestant):
    """Use transformers' Trainer with more callbacks, for norms by parameter and an average."""

    name = "stock Trainer, callbacks for norms and average"

    def train(self, setting: Setting, step_done: Callable[[], None]) -> None:
        trainer = Trainer(setting.model, _arguments(setting), train_dataset=setting.dataset())
        trainer.add_callback(_NormsByHand())
        trainer.add_callback(_AverageByHand())
        _train(trainer, step_done)


class Ours(Contestant):
    """Use MFTrainer with dynamic loss scale, norms by parameter, an average, and step records."""

    name = "MFTrainer, everything on"

    def train(self, setting: Setting, step_done: Callable[[], None]) -> None:
        logging.getLogger("mfwrap").setLevel(logging.ERROR)
        trainer = MFTrainer(
            setting.model,
            _arguments(setting),
            train_dataset=setting.dataset(),
            callbacks=[MFLossMonitor()],
            step=StepConfig(local_norm=True),
            ema=lambda model: ExponentialMovingAverage(model, DECAY),
            scale_sense=_dynamic_scale(),
        )
        _train(trainer, step_done)


class Lightning(Contestant):
    """Use Lightning with its own average of weights and its own norms of gradients."""

    name = "Lightning, norms and average"

    def train(self, setting: Setting, step_done: Callable[[], None]) -> None:
        from lightning.pytorch import LightningModule  # noqa: PLC0415  (may not be installed)
        from lightning.pytorch import Trainer as LightningTrainer  # noqa: PLC0415  (may not be installed)
        from lightning.pytorch.callbacks import Callback, WeightAveraging  # noqa: PLC0415  (may not be installed)
        from lightning.pytorch.utilities import grad_norm  # noqa: PLC0415  (may not be installed)

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = setting.model

            def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
                loss: Tensor = self.model(**batch).loss
                return loss

            def on_before_optimizer_step(self, _: Any) -> None:
                self.norms = {k: float(v) for k, v in grad_norm(self.model, 2).items()}

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.AdamW(self.parameters(), LEARNING_RATE, fused=True)
                schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, setting.steps)
                return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        class Steps(Callback):
            def on_train_batch_end(self, _: Any, __: Any, ___: Any, ____: Any, index: int) -> None:
                if (index + 1) % setting.accumulation == 0:
                    step_done()

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer = LightningTrainer(
            accelerator=setting.device,
            max_steps=setting.steps,
            accumulate_grad_batches=setting.accumulation,
            gradient_clip_val=MAX_GRAD_NORM,
            callbacks=[
                Steps(),
                WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
            ],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=setting.folder,
        )
        trainer.fit(Module(), setting.loader())


def _optimizer_and_schedule(setting: Setting) -> tuple[torch.optim.AdamW, LambdaLR]:
    optimizer = torch.optim.AdamW(setting.model.parameters(), LEARNING_RATE, fused=True)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, WARMUP, setting.steps)


def _updates(setting: Setting) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the micro-batches of each update, on the device."""
    micro_batches = []
    for batch in setting.loader():
        micro_batches.append(
            {name: tensor.to(setting.device, non_blocking=True) for name, tensor in batch.items()}
        )
        if len(micro_batches) == setting.accumulation:
            yield micro_batches
            micro_batches = []


class PlainLoop(Contestant):
    """Use torch alone, as torchtune's recipes for one device do: no norms, no average.

    torchtune's weights for micro-batches of different lengths are left out: these have one length.
    These recipes read the loss of each update on the host. This loop reads it as often as the
    others do, so that it is not slower for that alone.
    """

    name = "plain loop, as in torchtune's recipes"

    def train(self, setting: Setting, step_done: Callable[[], None]) -> None:
        model = setting.model.to(setting.device).train()
        optimizer, schedule = _optimizer_and_schedule(setting)
        in_bfloat16 = setting.precision == "bf16"
        for number, micro_batches in enumerate(_updates(setting), 1):
            running_loss = torch.zeros((), device=setting.device)
            for batch in micro_batches:
                with torch.autocast(setting.device, torch.bfloat16, enabled=in_bfloat16):
                    loss = model(**batch).loss / setting.accumulation
                running_loss += loss.detach()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if number % setting.logging_steps == 0:
                self.loss = running_loss.item()
            step_done()


class CellLoop(Contestant):
    """Use `MFTrainOneStepCell` in the plain loop, with everything on."""

    name = "plain loop, MFTrainOneStepCell, everything on"

    def train(self, setting: Setting, step_done: Callable[[], None]) -> None:
        model = setting.model.to(setting.device).train()
        optimizer, schedule = _optimizer_and_schedule(setting)
        cell = MFTrainOneStepCell(
            model,
            optimizer,
            use_clip_grad=True,
            max_grad_norm=MAX_GRAD_NORM,
            scale_sense=_dynamic_scale(),
            local_norm=True,
            gradient_accumulation_steps=setting.accumulation,
            lr_scheduler=schedule,
            ema=ExponentialMovingAverage(model, DECAY),
            accelerator=setting.accelerator() if setting.precision != "no" else None,
        )
        for number, micro_batches in enumerate(_updates(setting), 1):
            output = cell.step(micro_batches)
            if number % setting.logging_steps == 0:
                self.loss = output.loss.item()
            step_done()
        cell.flush()


class AccelerateLoop(Contestant):
    """Use a loop of accelerate as it is: no norms by parameter, no average."""

    name = "accelerate loop"

    def prepare(self, accelerator: Accelerator) -> None:
        """Do what comes before ``accelerator.prepare``."""

    def train(self, setting: Setting, step_done: Callable[[], None]) -> None:
        accelerator = setting.accelerator()
        self.prepare(accelerator)
        model, optimizer, schedule, loader = accelerator.prepare(
            setting.model, *_optimizer_and_schedule(setting), setting.loader()
        )
        model.train()
        parameters = list(model.parameters())
        num_updates = 0
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                num_updates += 1
                if num_updates % setting.logging_steps == 0:
                    self.loss = loss.item()
                step_done()


class AttachedLoop(AccelerateLoop):
    """Use `attach` in the loop of accelerate, with everything on."""

    name = "accelerate loop, mfwrap attached, everything on"

    def prepare(self, accelerator: Accelerator) -> None:
        attach(
            accelerator,
            StepConfig(local_norm=True),
            ema=lambda model: ExponentialMovingAverage(model, DECAY),
            scale_sense=_dynamic_scale(),
        )


CONTESTANTS: tuple[Contestant, ...] = (
    Stock(),
    StockWithCallbacks(),
    Ours(),
    *((Lightning(),) if importlib.util.find_spec("lightning") else ()),
    AccelerateLoop(),
    AttachedLoop(),
    PlainLoop(),
    CellLoop(),
)
