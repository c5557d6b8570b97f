"""Run short trainings with the stock Trainer and with MFTrainer, and compare two of them."""

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from mfwrap.compatibility.foreign import is_installed
from support.small_networks import IGNORED

__all__ = [
    "Counting",
    "EndlessCounting",
    "Run",
    "assert_same_log",
    "assert_same_weights",
    "counted_labels",
    "logged",
    "messages_of",
    "new_trainer",
    "padded",
    "spoilt_llama",
    "tiny_llama",
    "train",
    "values",
]

VOCABULARY = 32


class Counting(Dataset):
    """A data set of rows of numbers that count up, with strides of 1, 2 and 3 in turn.

    Args:
        num_rows: Number of rows.
        length: Length of each row; by default 5 to 12.
    """

    def __init__(self, num_rows: int, length: int | None = None) -> None:
        self._num_rows, self._length = num_rows, length

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._num_rows:
            raise IndexError(index)
        length, stride = self._length or 5 + 5 * index % 8, 1 + index % 3
        row = (index + stride * torch.arange(length)) % VOCABULARY
        return {"input_ids": row, "labels": row.clone()}


class EndlessCounting(IterableDataset):
    """An iterable data set without a length, which repeats seven rows endlessly."""

    def __iter__(self):
        while True:
            yield from Counting(7)


def padded(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows as one batch, padded at their ends; padding is not a target."""
    inputs, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(inputs, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def counted_labels(labels: Tensor) -> Tensor:
    """Return the labels that the installed Trainer counts as targets of a causal language model.

    The first label of each row is no target, but before transformers 5.11 it is counted, so the
    Trainer's losses and gradients are smaller there.
    """
    return labels[:, 1:] if is_installed("transformers", "5.11") else labels


def tiny_llama() -> LlamaForCausalLM:
    """Return a Llama of two layers and hidden size 16, with dropout and fixed initial weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def spoilt_llama(factors: Sequence[float]) -> LlamaForCausalLM:
    """Return the tiny Llama whose losses in training are multiplied by factors.

    Args:
        factors: Factors of the first micro-batches; all later micro-batches have a factor of 1.
    """
    model = tiny_llama()
    left = iter(factors)

    def spoil(module: nn.Module, inputs: Any, output: Any) -> None:
        if module.training:
            output["loss"] = output["loss"] * next(left, 1.0)

    model.register_forward_hook(spoil)
    return model


class Run(NamedTuple):
    """The results of a training."""

    trainer: Trainer
    result: Any
    """Return value of ``train``."""

    log: list[dict[str, Any]]
    """Entries of the Trainer's log."""

    weights: dict[str, Tensor]
    """Copies of the weights, by name."""


def new_trainer(
    kind: type[Trainer],
    folder: Path,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    extras: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """Return a silent trainer on CPU that shares no state with earlier ones.

    Args:
        kind: Class of the trainer.
        folder: Folder for checkpoints.
        model: Model to train; by default a new tiny Llama.
        data: Training data; by default 64 rows of `Counting`.
        callbacks: Callbacks of the user.
        extras: Further keywords of the trainer.
        arguments: Keywords of ``TrainingArguments``. By default each update is logged, and no
            checkpoint is saved.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    data = Counting(64) if data is None else data
    trainer = kind(
        model=tiny_llama() if model is None else model,
        args=TrainingArguments(output_dir=str(folder), **defaults | arguments),
        train_dataset=data,
        eval_dataset=Counting(6),
        callbacks=list(callbacks),
        **{"data_collator": padded} | (extras or {}),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(trainer: Trainer, resume: Path | None = None) -> Run:
    """Train, and return the results."""
    result = trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return Run(trainer, result, trainer.state.log_history, weights)


def values(run: Run, name: str) -> list[Any]:
    """Return the values of `name` in the log, one for each entry that has it."""
    return [entry[name] for entry in run.log if name in entry]


class _Messages(logging.Handler):
    """Collect the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def messages_of(name: str) -> Iterator[list[str]]:
    """Collect the messages that a logger gives within the block, even if it does not propagate.

    Args:
        name: Name of the logger.
    """
    handler = _Messages()
    logging.getLogger(name).addHandler(handler)
    try:
        yield handler.messages
    finally:
        logging.getLogger(name).removeHandler(handler)


_TIMES = ("_runtime", "_per_second", "step_time")


def logged(run: Run, after: int = 0) -> list[dict[str, Any]]:
    """Return the entries of a log later than a step, without times."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
        for entry in run.log
        if entry["step"] > after
    ]


def assert_same_log(stock: Run, ours: Run, *, relative: float = 1e-6) -> None:
    """Fail unless our log has everything in the stock Trainer's log; it may have more.

    Args:
        stock: Run of the stock Trainer.
        ours: Run of the other trainer.
        relative: Largest allowed relative difference of a number. Learning rates, steps and epochs
            must be equal.
    """
    assert [entry["step"] for entry in ours.log] == [entry["step"] for entry in stock.log]
    for expected, actual in zip(stock.log, ours.log, strict=True):
        for name, value in expected.items():
            if name.endswith(_TIMES):
                continue
            exact = name in {"learning_rate", "step", "epoch"}
            close = math.isclose(actual[name], value, rel_tol=0 if exact else relative)
            assert close, f"step {expected['step']}: {name} is {actual[name]}, not {value}"
    names = {"loss", "grad_norm", "learning_rate"}
    assert any(names <= entry.keys() for entry in stock.log)


def assert_same_weights(stock: Run, ours: Run, *, difference: float = 0.0) -> None:
    """Fail if weights differ by more than `difference`; by default they must be bit-identical."""
    assert list(ours.weights) == list(stock.weights)
    for name, expected in stock.weights.items():
        actual = ours.weights[name]
        assert actual.dtype == expected.dtype, name
        assert expected.isfinite().all(), name
        apart = (actual - expected).abs().max().item()
        assert apart <= difference, f"{name} differs by {apart}"
