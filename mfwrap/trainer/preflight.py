"""Check the optimizer of an `MFTrainer`, and before the first update that all ranks agree."""

from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from mfwrap.checkpoints.host_copies import memory_problem
from mfwrap.config import StepConfig
from mfwrap.preflight import (
    check_ranks_agree,
    checkpoint_bytes,
    disk_problem,
    setting_facts,
    step_facts,
)
from mfwrap.step.backward_updates import refuse_update_in_backward
from mfwrap.step.parameters import refuse_generation_pipeline
from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.trainer.events import monitors
from mfwrap.trainer.view import TrainerView, run_folder_of

WITHOUT_EFFECT = frozenset({
    "disable_tqdm", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision",
    "hub_strategy", "hub_token", "log_level", "log_level_replica", "log_on_each_node", "output_dir",
    "project", "push_to_hub", "run_name", "skip_memory_metrics", "trackio_bucket_id",
    "trackio_space_id", "trackio_static_space_id",
})  # fmt: skip
"""Training arguments that change neither the weights nor the records of a run."""

_MAY_DIFFER = (
    *WITHOUT_EFFECT,
    # Names that differ between machines.
    *("local_rank", "report_to", "resume_from_checkpoint"),
    # Ranks may have different seeds on purpose. The seed of the data (`data_seed`) is compared.
    "seed",
    # Settings for loading data.
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    # Objects whose text differs between processes.
    *("parallelism_config", "deepspeed", "fsdp_config"),
)
"""Training arguments that may differ between ranks."""


_AFTER_BACKWARD = {
    "lomo": "sgd",
    "adalomo": "adafactor",
    **{
        f"{name}_layerwise": name
        for name in ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
    },
}
"""Values of `optim` whose weights change during backward, each with the value that is closest among
those whose weights change after backward."""


def check_optim(args: TrainingArguments) -> None:
    """Raise an error if ``args.optim`` names an optimizer that changes weights during backward.

    Raises:
        ValueError: If it does. The message names the value to use instead.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if name in _AFTER_BACKWARD:
        msg = (
            f"`optim` must be an optimizer that changes its weights after backward, got {name!r}, "
            "which changes them during backward, before the step can know of an overflow; use "
            f"{_AFTER_BACKWARD[name]!r}"
        )
        raise ValueError(msg)


def check_construction(trainer: TrainerView) -> None:
    """Raise an error if the step cannot train a trainer's model or run its optimizer.

    Call it at the end of the trainer's construction.

    Raises:
        TypeError: If the trainer was given an optimizer that changes weights during backward.
        ValueError: If ``args.optim`` names such an optimizer, transformers has split the model
            into pipeline stages, or the trained loss is not the mean of the losses of rows, which
            an argument needs.
    """
    refuse_generation_pipeline(trainer.model)
    check_optim(trainer.args)
    trainer.loss_by_row.check_trainer()
    if trainer.optimizer is not None:
        refuse_update_in_backward(unwrapped_optimizer(trainer.optimizer))


def check_trainer_ranks(
    trainer: TrainerView,
    settings: StepConfig,
    num_updates: int,
    updates_per_epoch: int,
    skipped_rows: str,
    growth: Mapping[str, Any],
    *,
    sources: str,
    copies_state: bool = False,
) -> None:
    """Raise the same error on all ranks if they disagree, or if a checkpoint cannot be written.

    Call it on all ranks, when the trainer knows the number of updates.

    Args:
        trainer: The trainer.
        settings: Settings of the step.
        num_updates: Number of updates of the training.
        updates_per_epoch: Number of updates of an epoch.
        skipped_rows: Description of the rows that are left out.
        growth: How the batch grows, by the name of the setting; empty if it does not.
        sources: Description of the sources of the data.
        copies_state: Whether a checkpoint is written from a copy of the state in host memory.

    Raises:
        RuntimeError: If the ranks disagree, or if a rank has a problem.
    """
    args, model = trainer.args, trainer.model
    if trainer.optimizer is None and not trainer.is_fsdp_enabled:
        trainer.create_optimizer()
    optimizers = [] if trainer.optimizer is None else [trainer.optimizer]
    numbers = {
        "number of updates": str(num_updates),
        "first update": str(trainer.state.global_step),
        "rows to leave out": skipped_rows,
        "growth of the batch": str(growth),
        "sources of the data": sources,
    }
    if args.max_steps <= 0 or "epoch" in (args.eval_strategy, args.save_strategy):
        numbers["number of updates in an epoch"] = str(updates_per_epoch)
    callbacks = trainer.callback_handler.callbacks
    own = [each for each in callbacks if _is_own(each)]
    facts = step_facts([model], optimizers, settings) | {
        "data": numbers,
        "training arguments": setting_facts(args, _MAY_DIFFER),
        "callbacks": {"list of mfwrap's callbacks": str([type(each).__name__ for each in own])},
    }
    problems = []
    held = {each for one in optimizers for group in one.param_groups for each in group["params"]}
    if held and held.isdisjoint(model.parameters()):
        problems.append(
            f"the optimizer must hold parameters of the model, got {len(held)} parameters of others"
        )
    by_callback = any(each.saves_checkpoints for each in monitors(callbacks))
    if args.should_save and (args.save_strategy != "no" or by_callback):
        saved = None if args.save_only_model else trainer.optimizer
        size = checkpoint_bytes(model, saved, has_average=trainer.ema is not None)
        found = [disk_problem(run_folder_of(trainer), size)]
        found += [memory_problem(size)] if copies_state else []
        problems += [each for each in found if each]
    check_ranks_agree(facts, problems)
    trainer.attached.attachment.ranks.are_checked = True


def _is_own(callback: object) -> bool:
    return type(callback).__module__.startswith("mfwrap.callbacks")
