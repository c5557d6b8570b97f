"""Train a small Llama on Python's own documentation, byte by byte, with the training cell.

    python -m mfwrap.recipes.causal_lm --output_dir runs/causal_lm
    torchrun --nproc_per_node 2 -m mfwrap.recipes.causal_lm

Nothing is downloaded: the model is built from its configuration, and the text comes from Python's
`pydoc_data.topics`. The run folder gets `metrics.jsonl`, `run.png`, and the models of raw and of
averaged weights in the format of `save_pretrained`. `LoopMonitor` adds what the run was, and its
anomalies. Only the main process writes, except for the local norms of each rank.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    get_cosine_schedule_with_warmup,
)
from transformers.utils.logging import disable_progress_bar

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, MFTrainOneStepCell
from mfwrap.callbacks import LoopMonitor, MetricsRecorder, MFLossMonitor
from mfwrap.checkpoints.ownership import exiting_when_in_use
from mfwrap.checkpoints.whole import whole_folder
from mfwrap.report import draw_run

IGNORED_LABEL = -100


@dataclass
class RecipeArguments:
    """Settings of the run."""

    output_dir: Path = field(default=Path("runs/causal_lm"), metadata={"help": "run folder"})
    max_steps: int = field(default=250, metadata={"help": "number of updates"})
    micro_batch_size: int = field(default=8, metadata={"help": "texts per micro-batch"})
    gradient_accumulation_steps: int = field(
        default=2, metadata={"help": "micro-batches per update"}
    )
    sequence_length: int = field(default=256, metadata={"help": "longest text, in bytes"})
    learning_rate: float = field(default=3e-3, metadata={"help": "highest learning rate"})
    warmup_steps: int = field(default=30, metadata={"help": "updates of linear warm-up"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "limit of the global norm"})
    ema_decay: float = field(default=0.95, metadata={"help": "decay of the averaged weights"})
    mixed_precision: str = field(default="no", metadata={"help": "no, bf16 or fp16"})
    logging_steps: int = field(default=10, metadata={"help": "updates between two log lines"})
    seed: int = field(default=0, metadata={"help": "seed of the weights and of the data order"})

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: If a number is too small to train anything.
        """
        # A text of one byte has no next byte to predict.
        smallest = {"max_steps": 1, "micro_batch_size": 1, "sequence_length": 2, "logging_steps": 1}
        for name, limit in smallest.items():
            if getattr(self, name) < limit:
                msg = f"`{name}` must be >= {limit}, got {getattr(self, name)}"
                raise ValueError(msg)


class PythonTopics(Dataset[dict[str, Tensor]]):
    """The topics of Python's `help()` as bytes, cut into pieces of equal length.

    The last piece of each topic is padded. Padding is not a target.

    Args:
        names: Names of the topics.
        sequence_length: Length of a piece, in bytes.
    """

    def __init__(self, names: Sequence[str], sequence_length: int) -> None:
        self._length = sequence_length
        texts = [topics[name].encode() for name in names]
        self._pieces = [
            text[start : start + sequence_length]
            for text in texts
            for start in range(0, len(text), sequence_length)
        ]

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one piece: ``input_ids`` and ``labels``, shape ``(sequence_length,)``, int64."""
        piece = torch.frombuffer(bytearray(self._pieces[index]), dtype=torch.uint8).long()
        padding = self._length - len(piece)
        return {
            "input_ids": torch.nn.functional.pad(piece, (0, padding)),
            "labels": torch.nn.functional.pad(piece, (0, padding), value=IGNORED_LABEL),
        }


def build_model(sequence_length: int) -> LlamaForCausalLM:
    """Return a Llama of 1.3 million random weights, whose tokens are bytes."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=160,
            intermediate_size=432,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=sequence_length,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def text_loaders(
    batch_size: int, sequence_length: int, seed: int, max_samples: int | None = None
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of training text and of held-out text, which is every tenth topic.

    Args:
        batch_size: Pieces of text per batch.
        sequence_length: Length of a piece, in bytes.
        seed: Seed of the order of the training text.
        max_samples: Largest number of pieces of each text; ``None`` for all.
    """
    names = sorted(topics)
    training = PythonTopics([n for i, n in enumerate(names) if i % 10], sequence_length)
    held_out = PythonTopics([n for i, n in enumerate(names) if not i % 10], sequence_length)
    order = torch.Generator().manual_seed(seed)
    return (
        DataLoader(_first(training, max_samples), batch_size, shuffle=True, generator=order),
        DataLoader(_first(held_out, max_samples), batch_size),
    )


def _first(dataset: PythonTopics, number: int | None) -> Dataset[dict[str, Tensor]]:
    return dataset if number is None else Subset(dataset, range(min(number, len(dataset))))


def micro_batches(loader: DataLoader[Any], number: int) -> Iterator[list[dict[str, Tensor]]]:
    """Yield lists of `number` batches, epoch after epoch, without end."""
    pending: list[dict[str, Tensor]] = []
    while True:
        for batch in loader:
            pending.append(batch)
            if len(pending) == number:
                yield pending
                pending = []


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: DataLoader[Any], accelerator: Accelerator) -> float:
    """Return the mean loss per byte of held-out text, over all processes."""
    model.eval()
    totals = torch.zeros(2, device=accelerator.device)
    for batch in loader:
        num_targets = batch["labels"][:, 1:].ne(IGNORED_LABEL).sum()
        totals += torch.stack((model(**batch).loss * num_targets, num_targets))
    model.train()
    loss, num_targets = accelerator.reduce(totals)
    return float(loss / num_targets)


def monitored(
    arguments: RecipeArguments,
    cell: MFTrainOneStepCell,
    recorder: MetricsRecorder,
    num_processes: int,
) -> LoopMonitor:
    """Return the monitor of the run, which logs it as MindFormers does and describes it."""
    samples = arguments.micro_batch_size * arguments.gradient_accumulation_steps * num_processes
    loss_monitor = MFLossMonitor(
        per_print_times=arguments.logging_steps,
        origin_epochs=1,
        dataset_size=arguments.max_steps,
        global_batch_size=samples,
    )
    return LoopMonitor(
        cell,
        arguments.output_dir,
        callbacks=[recorder, loss_monitor],
        max_steps=arguments.max_steps,
        global_batch_size=samples,
        configuration={"recipe": dataclasses.asdict(arguments)},
    )


def train(
    arguments: RecipeArguments,
    cell: MFTrainOneStepCell,
    loader: DataLoader[Any],
    recorder: MetricsRecorder,
    monitor: LoopMonitor,
) -> None:
    """Train for all updates, and record each."""
    batches = micro_batches(loader, arguments.gradient_accumulation_steps)
    for step, batch in zip(range(1, arguments.max_steps + 1), batches, strict=False):
        cell.step(batch)
        monitor.end_step()
        if step % arguments.logging_steps == 0:
            recorder.write_steps()
    cell.flush()


def train_and_save(arguments: RecipeArguments, accelerator: Accelerator) -> None:
    """Build the model, train it, evaluate raw and averaged weights, and save both."""
    model = build_model(arguments.sequence_length)
    optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate, fused=True)
    schedule = get_cosine_schedule_with_warmup(
        optimizer, arguments.warmup_steps, arguments.max_steps
    )
    model, optimizer, training, held_out = accelerator.prepare(
        model,
        optimizer,
        *text_loaders(arguments.micro_batch_size, arguments.sequence_length, arguments.seed),
    )
    ema = ExponentialMovingAverage(model, arguments.ema_decay, warmup=True)
    cell = MFTrainOneStepCell(
        model,
        optimizer,
        use_clip_grad=True,
        max_grad_norm=arguments.max_grad_norm,
        scale_sense=DynamicLossScaleUpdateCell(65536.0, scale_factor=2, scale_window=100),
        local_norm=True,
        accelerator=accelerator,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        lr_scheduler=schedule,
        ema=ema,
        calculate_per_token_loss=True,
        local_norm_groups="layer",
    )
    recorder = MetricsRecorder(arguments.output_dir)
    start = evaluate(model, held_out, accelerator)
    with monitored(arguments, cell, recorder, accelerator.num_processes) as monitor:
        train(arguments, cell, training, recorder, monitor)
    recorder.write({"step": 0, "eval_loss": start, "max_grad_norm": arguments.max_grad_norm})
    raw = evaluate(model, held_out, accelerator)
    with ema.swap():
        averaged = evaluate(model, held_out, accelerator)
    recorder.write({"step": arguments.max_steps, "eval_loss": raw, "ema_eval_loss": averaged})
    if accelerator.is_main_process:
        save(arguments, accelerator.unwrap_model(model), ema)
    accelerator.print(
        f"loss on held-out text: {start:.3f} at the start, {raw:.3f} with raw weights, "
        f"{averaged:.3f} with averaged weights\nrun folder: {arguments.output_dir}"
    )


def save(
    arguments: RecipeArguments, model: LlamaForCausalLM, ema: ExponentialMovingAverage
) -> None:
    """Write the models of raw and of averaged weights, and the picture of the run."""
    disable_progress_bar()
    with whole_folder(arguments.output_dir / "model") as written:
        model.save_pretrained(written)
    with ema.swap(), whole_folder(arguments.output_dir / "model_ema") as written:
        model.save_pretrained(written)
    draw_run(
        arguments.output_dir,
        arguments.output_dir / "run.png",
        title="A small Llama on Python's documentation",
        loss_title="Loss, in nats per byte",
    )


def main() -> None:
    """Read the settings, train, evaluate raw and averaged weights, and write the run folder."""
    # mypy rejects any dataclass here: HfArgumentParser declares its argument as a `NewType`.
    parser = HfArgumentParser(RecipeArguments)  # type: ignore[arg-type]  # (see above)
    (arguments,) = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    accelerator = Accelerator(
        # Without `cpu=True`, accelerate would not connect several processes on a machine that has
        # no accelerator: each would train alone.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
    )
    train_and_save(arguments, accelerator)
    # Release the network before the process group ends: otherwise the processes may hang at exit.
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    with exiting_when_in_use():
        main()
