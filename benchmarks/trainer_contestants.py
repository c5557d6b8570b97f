"""Contestants of trainer.py: ways to run a whole training step."""

import abc
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import (
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, StepConfig
from mfwrap.callbacks import MFLossMonitor
from mfwrap.trainer import MFTrainer

DECAY = 0.999
LEARNING_RATE = 1e-4
WARMUP = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """The model, data and sizes that every contestant trains with."""

    model: LlamaForCausalLM
    tokens: Tensor
    folder: str
    device: str
    batch_size: int
    accumulation: int
    steps: int

    def dataset(self) -> list[dict[str, Tensor]]:
        """Return one sample per sequence."""
        return [{"input_ids": row, "labels": row} for row in self.tokens]


class Contestant(abc.ABC):
    """One way to train."""

    name: str

    @abc.abstractmethod
    def train(self, setting: Setting, step_done: Callable[[], None]) -> None:
        """Train, and call `step_done` at the end of each update."""


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
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        use_cpu=setting.device == "cpu",
        logging_steps=5,
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
            scale_sense=DynamicLossScaleUpdateCell(65536, 2, 2000),
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
            gradient_clip_val=1.0,
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
        dataset: Any = setting.dataset()
        loader: Any = DataLoader(dataset, setting.batch_size, shuffle=True)
        trainer.fit(Module(), loader)


CONTESTANTS: tuple[Contestant, ...] = (
    Stock(),
    StockWithCallbacks(),
    Ours(),
    *((Lightning(),) if importlib.util.find_spec("lightning") else ()),
)
