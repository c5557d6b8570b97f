"""The arguments that monitors read, in a loop that has no ``TrainingArguments``."""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from mfwrap.collectives import this_rank


@dataclass(kw_only=True)
class LoopArguments:
    """Stand in for ``TrainingArguments`` in a loop of your own; monitors read these fields."""

    output_dir: str
    max_steps: int
    gradient_accumulation_steps: int
    process_index: int
    fp16: bool
    bf16: bool
    seed: int
    global_batch_size: int = 0
    """Samples of one update on all processes; 0 if unknown."""

    num_train_epochs: float = 0.0
    data_seed: int | None = None
    max_grad_norm: float | None = None
    """Limit of the last clipping; ``None`` if nothing has been clipped yet."""

    torch_compile: bool = False
    eval_on_start: bool = False
    load_best_model_at_end: bool = False
    save_total_limit: int | None = None
    accelerator_config: object = None
    resume_from_checkpoint: str | None = None
    report_to: tuple[str, ...] = ()

    @property
    def should_save(self) -> bool:
        """Whether this is the process that writes checkpoints."""
        return self.process_index == 0


def loop_arguments(
    folder: Path, max_steps: int, accelerator: Accelerator | None, *, global_batch_size: int = 0
) -> LoopArguments:
    """Return the arguments of a loop.

    Args:
        folder: Run folder.
        max_steps: Updates of the run.
        accelerator: Accelerator of the loop; ``None`` without accelerate.
        global_batch_size: Samples of one update on all processes; 0 if unknown.
    """
    precision = "no" if accelerator is None else accelerator.mixed_precision
    return LoopArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        gradient_accumulation_steps=(
            1 if accelerator is None else accelerator.gradient_accumulation_steps
        ),
        process_index=this_rank(),
        fp16=precision == "fp16",
        bf16=precision == "bf16",
        seed=torch.initial_seed(),
        global_batch_size=global_batch_size,
    )
