"""What the parts of an `MFTrainer` may see of it."""

from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap.accelerate.attached_step import AttachedStep


class TrainerView(Protocol):
    """A Trainer with the step attached, as its parts see it.

    A part gets the trainer at its construction, and looks at it when it works: most of these
    attributes are set or replaced later.
    """

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    attached: AttachedStep
    accelerator: Any
    callback_handler: Any
    model: Any
    optimizer: Any
    label_names: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    processing_class: Any
    compute_loss_func: Any
    compute_metrics: Any
    model_accepts_loss_kwargs: Any
    current_gradient_accumulation_steps: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    rollbacks: Any
    """`Rollbacks` of the trainer."""
    run_facts: Any
    """`TrainerFacts` of the trainer."""
    batch_growth: Any
    """`GrowingBatch` of the trainer."""
    loss_by_row: Any
    """`LossByRow` of the trainer."""

    @property
    def compute_loss(self) -> Any:
        """The method, or a function in its place."""

    def create_optimizer(self) -> Any:
        """Create the optimizer, unless there is one."""

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the number of rows of an update on all ranks."""

    def is_world_process_zero(self) -> bool:
        """Return whether this is the main process of all machines."""


def run_folder_of(trainer: TrainerView) -> Path:
    """Return the folder of the run; in a hyperparameter search, that of all trials."""
    return Path(str(trainer.args.output_dir))


def trains_shards(trainer: TrainerView) -> bool:
    """Return whether the optimizer trains shards, which are none of the model's own parameters."""
    return trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
