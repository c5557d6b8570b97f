"""Check the optimizer of an `MFTrainer`, and before the first update that all ranks agree."""

import dis
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import TrainingArguments

from mfwrap.arguments import callers_stacklevel
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


_LIBRARIES = frozenset({"mfwrap", "sentence_transformers", "transformers", "trl"})
"""Packages whose Trainers know how their losses are divided."""

_NUM_ITEMS = "num_items_in_batch"
_NUM_MICRO_BATCHES = frozenset(
    {"gradient_accumulation_steps", "current_gradient_accumulation_steps"}
)
"""Attributes by which a ``compute_loss`` of the user's own may divide its loss."""


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


def warn_of_undivided_loss(trainer: TrainerView) -> None:
    """Warn if an update adds up the losses of a ``compute_loss`` of the user's own, unnoticed.

    If the model takes ``num_items_in_batch``, a Trainer does not divide the losses of micro-batches
    by their number, because the model divides by the number of all targets. A method that neither
    reads that number nor divides otherwise returns means, whose sum is too large.

    Call it at the begin of a training.
    """
    is_divided = not trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if is_divided or trainer.args.gradient_accumulation_steps == 1:
        return
    if any(map(_ignores_num_items, _own_losses(trainer))):
        warnings.warn(
            f"`compute_loss` of {type(trainer).__name__} ignores `num_items_in_batch`, so the "
            f"Trainer adds up the losses of {trainer.args.gradient_accumulation_steps} "
            "micro-batches; if they are means, set `trainer.model_accepts_loss_kwargs = False`, "
            "and it divides them",
            stacklevel=callers_stacklevel(),
        )


def _own_losses(trainer: TrainerView) -> Iterator[Callable[..., Any]]:
    """Yield the user's own ``compute_loss``, and those of base classes that it passes on to."""
    kinds = (vars(each) for each in type(trainer).__mro__)
    for attributes in (vars(trainer), *kinds):
        function: Any = attributes.get("compute_loss")
        function = getattr(function, "__func__", function)
        library = str(getattr(function, "__module__", "mfwrap")).partition(".")[0]
        if library in _LIBRARIES:
            if library == "mfwrap":
                continue
            return
        if not hasattr(function, "__code__"):
            return
        yield function
        if "super" not in _read(function) or _read(function) & _NUM_MICRO_BATCHES:
            return


def _ignores_num_items(function: Callable[..., Any]) -> bool:
    named = inspect.signature(function).parameters
    given = {name for name, one in named.items() if one.kind is one.VAR_KEYWORD} | {_NUM_ITEMS}
    return not _read(function) & (given | _NUM_MICRO_BATCHES)


def _read(function: Callable[..., Any]) -> set[object]:
    """Return the names that the code of a function reads."""
    return {name for each in dis.get_instructions(function) for name in _names(each.argval)}


def _names(read: object) -> tuple[object, ...]:
    """Return what an instruction reads: one name, or two."""
    return read if isinstance(read, tuple) else (read,)


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
        size = checkpoint_bytes(model, saved, has_average=trainer.attached.ema is not None)
        found = [disk_problem(run_folder_of(trainer), size)]
        found += [memory_problem(size)] if copies_state else []
        problems += [each for each in found if each]
    check_ranks_agree(facts, problems)
    trainer.attached.attachment.ranks.are_checked = True


def _is_own(callback: object) -> bool:
    return type(callback).__module__.startswith("mfwrap.callbacks")
