"""The internals of transformers that MFTrainer uses are unchanged in the installed release.

tests/unit/compatibility/test_foreign.py finds private names that are used and not listed.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable

import pytest
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import (
    CallbackHandler,
    ExportableState,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints, sort_checkpoints

from mfwrap.trainer import MFTrainer, MFTrainerMixin
from mfwrap.trainer.events import StepCallbackHandler
from support.trainer_runs import new_trainer, train

RELEASE = f"transformers {transformers.__version__}"

REASONS = {
    "create_accelerator_and_postprocess": "attach the step to the accelerator",
    "create_scheduler": "advance the schedule for applied updates only",
    "set_initial_training_values": "know the data loader, and count updates of a growing batch",
    "get_train_dataloader": "let iterable data keep their place by their own state",
    "get_batch_samples": "read the micro-batches that an update has",
    "training_step": "count and filter losses, and weigh micro-batches that lack rows",
    "compute_loss": "report the losses that the output has beside `loss`",
    "prediction_step": "evaluate the rows of the last batch that are not repetitions",
    "_evaluate": "put averages into the model for an evaluation that the training requests",
    "evaluate": "do so, too, if a subclass calls it in the place of `_evaluate`",
    "evaluation_loop": "take the mean loss over the rows of all ranks",
    "_run_epoch": "follow the batches of an epoch, and begin where the data were left",
    "create_model_card": "add the settings of the step",
    "log": "add the counts of the step, and correct the mean loss",
    "train": "check the run folder and the checkpoint, and go back after a bad step",
    "_inner_training_loop": "enter and leave a training: signals, records, ranks, positions",
    "_init_training_state": "check the ranks, and leave data out",
    "_get_output_dir": "write a checkpoint into a temporary folder",
    "save_model": "save the weights of the training while averages are evaluated",
    "_save_checkpoint": "move a complete checkpoint into place",
    "_save_optimizer_and_scheduler": "write the optimizer's state in the background",
    "_save_scaler": "save the step and the position in the data",
    "_load_optimizer_and_scheduler": "load optimizer states without an update",
    "_load_scaler": "load the step",
    "_load_callback_state": "restore callbacks in place",
    "_load_rng_state": "restore the random numbers of the batch that was made ahead",
    "_save": "keep the network's own names, and leave tokens out",
    "_finalize_training": "take the mean loss of all steps, and keep checkpoints whole",
    "_load_from_checkpoint": "check the optimizer before weights are loaded",
}
"""Methods of the Trainer that MFTrainer overrides, and what each override is for."""

OVERRIDDEN = {
    "create_accelerator_and_postprocess": ("self", ["__init__"]),
    "create_scheduler": ("self, num_training_steps, optimizer=None", ["_prepare_for_training"]),
    "set_initial_training_values": ("self, args, dataloader", ["_inner_training_loop"]),
    "get_train_dataloader": ("self", ["_inner_training_loop"]),
    "get_batch_samples": ("self, epoch_iterator, num_batches, device", ["_run_epoch"]),
    "training_step": ("self, model, inputs, num_items_in_batch=None", ["_run_epoch"]),
    "prediction_step": (
        "self, model, inputs, prediction_loss_only, ignore_keys=None",
        ["evaluation_loop"],
    ),
    "evaluate": (
        "self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval'",
        ["_evaluate"],
    ),
    "evaluation_loop": (
        (
            "self, dataloader, description, prediction_loss_only=None, ignore_keys=None, "
            "metric_key_prefix='eval'"
        ),
        ["evaluate", "predict"],
    ),
    "compute_loss": (
        "self, model, inputs, return_outputs=False, num_items_in_batch=None",
        ["training_step", "prediction_step"],
    ),
    "_run_epoch": (
        (
            "self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, "
            "trial, ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, "
            "steps_trained_in_current_epoch"
        ),
        ["_inner_training_loop"],
    ),
    "create_model_card": (
        (
            "self, language=None, license=None, tags=None, model_name=None, finetuned_from=None, "
            "tasks=None, dataset_tags=None, dataset=None, dataset_args=None"
        ),
        ["push_to_hub"],
    ),
    "log": (
        "self, logs, start_time=None",
        ["_maybe_log_save_evaluate", "_finalize_training", "evaluate"],
    ),
    "train": ("self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None", []),
    "_inner_training_loop": (
        (
            "self, batch_size=None, args=None, resume_from_checkpoint=None, trial=None, "
            "ignore_keys_for_eval=None"
        ),
        ["train"],
    ),
    "_init_training_state": (
        (
            "self, max_steps, num_update_steps_per_epoch, num_train_epochs, "
            "resume_from_checkpoint, trial"
        ),
        ["_inner_training_loop"],
    ),
    "_get_output_dir": ("self, trial", ["_save_checkpoint"]),
    "_evaluate": (
        "self, trial, ignore_keys_for_eval, skip_scheduler=False",
        ["_maybe_log_save_evaluate", "_inner_training_loop"],
    ),
    "save_model": ("self, output_dir=None, _internal_call=False", ["_save_checkpoint"]),
    "_save_checkpoint": ("self, model, trial", ["_maybe_log_save_evaluate"]),
    "_save_optimizer_and_scheduler": ("self, output_dir", ["_save_checkpoint"]),
    "_save_scaler": ("self, output_dir", ["_save_checkpoint"]),
    "_load_optimizer_and_scheduler": ("self, checkpoint", ["_prepare_for_training"]),
    "_load_scaler": ("self, checkpoint", ["_prepare_for_training"]),
    "_load_callback_state": ("self", ["_init_training_state"]),
    "_load_rng_state": ("self, checkpoint", ["_run_epoch"]),
    "_save": ("self, output_dir=None, state_dict=None", ["save_model"]),
    "_finalize_training": ("self, trial, num_train_samples, start_time", ["_inner_training_loop"]),
    "_load_from_checkpoint": ("self, resume_from_checkpoint, model=None", ["train"]),
}
"""Methods of the Trainer that MFTrainer overrides: their parameters, and their callers."""

CALLED = {
    "_get_num_items_in_batch": (Trainer, "self, batch_samples, device"),
    "_prepare_inputs": (Trainer, "self, inputs"),
    "_push_from_checkpoint": (Trainer, "self, checkpoint_folder"),
    "call_event": (CallbackHandler, "self, event, args, state, control, **kwargs"),
    "create_optimizer": (Trainer, "self, model=None"),
    "floating_point_ops": (Trainer, "self, inputs"),
    "state": (ExportableState, "self"),
    "save_to_json": (TrainerState, "self, json_path"),
}
"""Methods that MFTrainer calls, replaces or asks for: their class and their parameters."""

ATTRIBUTES = {
    "accelerator": ["clip_grad_norm_", "device", "scaler", "wait_for_everyone"],
    "callback_handler": ["callbacks", "model", "optimizer", "lr_scheduler"],
    "args": [
        *("fp16", "gradient_accumulation_steps", "logging_nan_inf_filter", "max_grad_norm"),
        *("local_process_index", "output_dir", "process_index", "push_to_hub"),
        *("restore_callback_states_from_checkpoint", "save_on_each_node", "save_total_limit"),
        *("should_save", "world_size"),
    ],
    "state": ["best_model_checkpoint", "epoch", "global_step", "log_history", "stateful_callbacks"],
}

ORDERS = {
    "_run_epoch": (
        *(
            "epoch == epochs_trained and resume_from_checkpoint is not None",
            "skip_first_batches(",
            "iter(train_dataloader)",
            "get_batch_samples(",
            "current_gradient_accumulation_steps = len(batch_samples)",
            "_load_rng_state(",
        ),
        *("on_step_begin", "self.training_step(", "logging_nan_inf_filter", "_tr_loss += tr_loss"),
        *("_clip_grad_norm(", "_get_grad_norm(", "on_pre_optimizer_step", "self.optimizer.step()"),
        *("on_optimizer_step", "optimizer_step_was_skipped", "self.lr_scheduler.step()"),
        *("model.zero_grad()", "global_step += 1", "on_step_end", "_maybe_log_save_evaluate("),
    ),
    "_inner_training_loop": (
        *("accelerator.free_memory()", "self.set_initial_training_values("),
        *("_init_training_state(", "_prepare_for_training("),
        *("_tr_loss = torch.tensor(0.0", "_total_loss_scalar = 0.0", "_globalstep_last_logged ="),
        *("on_train_begin", "range(epochs_trained, num_train_epochs)", "on_epoch_begin"),
        *("_run_epoch(", "_finalize_training("),
    ),
    "_maybe_log_save_evaluate": (
        *("tr_loss -= tr_loss", 'logs["loss"] = tr_loss_scalar', "_total_loss_scalar +="),
        *("self.log(logs", "self._evaluate(", "_save_checkpoint(", "on_save"),
    ),
    "_prepare_for_training": (
        *("self.create_optimizer()", "accelerator.prepare(", "create_scheduler("),
        *("_load_optimizer_and_scheduler(", "_load_scaler("),
    ),
    "_save_checkpoint": (
        *("_get_output_dir(", "save_model(", "best_model_checkpoint =", "save_only_model"),
        *("_save_optimizer_and_scheduler(", "_save_scaler(", "_save_rng_state(", "save_to_json("),
        *("push_to_hub", "rotate_checkpoints("),
    ),
    "_finalize_training": (
        *("_total_loss_scalar += self._tr_loss.item()", 'metrics["train_loss"] = train_loss'),
        *("self.log(metrics)", "_load_best_model()"),
        *("save_total_limit == 1", "samefile(", "shutil.rmtree(checkpoint", "on_train_end"),
    ),
    "train": ("call_model_init(", "self._load_from_checkpoint(", "find_executable_batch_size("),
}
"""Expressions in methods of the Trainer whose order MFTrainer depends on."""


def parameters(function: Callable[..., object]) -> str:
    """Return a function's parameters without their types."""
    found = inspect.signature(function).parameters.values()
    return ", ".join(str(each.replace(annotation=each.empty)) for each in found)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_overridden_method_is_what_it_was(name):
    """Each overridden method exists in the Trainer, with the parameters listed in `OVERRIDDEN`."""
    method = vars(Trainer).get(name)
    assert method is not None, f"{RELEASE} has no Trainer.{name}, which MFTrainerMixin overrides"

    expected, _ = OVERRIDDEN[name]
    found = parameters(method)
    assert found == expected, (
        f"{RELEASE}: Trainer.{name} takes ({found}), no longer ({expected}); adapt "
        f"MFTrainerMixin.{name}"
    )


@pytest.mark.parametrize(
    ("caller", "name"), [(caller, name) for name in OVERRIDDEN for caller in OVERRIDDEN[name][1]]
)
def test_an_overridden_method_is_still_called(caller, name):
    """The Trainer's methods still call each overridden method."""
    method = vars(Trainer).get(caller)
    assert method is not None, f"{RELEASE} has no Trainer.{caller}, which called Trainer.{name}"

    # Search for the name without a parenthesis, because `train` passes `_inner_training_loop` as an
    # argument and does not call it directly.
    called = re.search(rf"self\.{name}\b", inspect.getsource(method))
    assert called, f"{RELEASE}: Trainer.{caller} no longer calls Trainer.{name}"


def test_no_other_method_is_overridden():
    """`OVERRIDDEN` lists every method of the Trainer that MFTrainerMixin overrides."""
    shared = {name for name in vars(MFTrainerMixin) if name in vars(Trainer)}

    assert shared - OF_EVERY_CLASS == OVERRIDDEN.keys() == REASONS.keys()


def test_only_overridden_methods_call_the_model(tmp_path):
    """From `train` to the forward of the model, mfwrap's functions are overridden methods alone."""
    callers = []

    def note_callers(*_):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals["__name__"].startswith("mfwrap."):
                callers.append(frame.f_code.co_qualname)
            frame = frame.f_back

    trainer = new_trainer(MFTrainer, tmp_path, max_steps=1, gradient_accumulation_steps=1)
    trainer.model.register_forward_pre_hook(note_callers)
    trainer.train()

    names = ["compute_loss", "training_step", "_run_epoch", "_inner_training_loop", "train"]
    assert OVERRIDDEN.keys() >= {*names}
    assert callers == [f"MFTrainerMixin.{name}" for name in names]


class _WithAnnotation:
    annotated: int


OF_EVERY_CLASS = {*vars(object), *vars(_WithAnnotation), "__annotations_cache__"}
"""Names that Python adds to a class; the cache appears in Python 3.14 when annotations are read."""


def test_no_name_of_the_mixin_is_taken_by_chance():
    """The Trainer has no attribute with the name of a method that the mixin adds."""
    added = {name for name in vars(MFTrainerMixin) if not name.startswith("__")} - set(OVERRIDDEN)

    taken = added & set(dir(Trainer))
    assert not taken, f"{RELEASE}: the Trainer has {sorted(taken)}; rename them in the mixin"


@pytest.mark.parametrize("name", CALLED)
def test_a_method_that_is_called_is_what_it_was(name):
    """Each method that MFTrainer calls exists, with the parameters listed in `CALLED`."""
    kind, expected = CALLED[name]
    method = vars(kind).get(name)

    assert method is not None, f"{RELEASE} has no {kind.__name__}.{name}"
    found = parameters(method)
    assert found == expected, f"{RELEASE}: {kind.__name__}.{name} takes ({found}), not ({expected})"


def test_functions_that_are_called_take_what_they_are_given():
    """The functions that MFTrainer calls have the parameters that it passes."""
    names = {"output_dir", "save_total_limit", "best_model_checkpoint", "use_mtime"}

    missing = names - inspect.signature(rotate_checkpoints).parameters.keys()
    assert not missing, f"{RELEASE}: rotate_checkpoints takes no {sorted(missing)}"
    assert parameters(get_last_checkpoint) == "folder", f"{RELEASE}: get_last_checkpoint changed"
    names = {"output_dir", "best_model_checkpoint"}
    missing = names - inspect.signature(sort_checkpoints).parameters.keys()
    assert not missing, f"{RELEASE}: sort_checkpoints takes no {sorted(missing)}"


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_the_loop_is_what_it_was(name):
    """In each method of `ORDERS`, the expressions occur in the listed order."""
    source = inspect.getsource(vars(Trainer)[name])
    body = source[source.index(":\n") :]
    position = 0
    for expected in ORDERS[name]:
        found = body.find(expected, position)
        known = "" if body.find(expected) < 0 else " in the expected order"
        assert found >= 0, f"{RELEASE}: Trainer.{name} no longer has {expected!r}{known}"
        position = found


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_attributes_that_are_used_exist(owner, tmp_path):
    """A new Trainer and its objects have the attributes that MFTrainer uses."""
    trainer = new_trainer(Trainer, tmp_path)

    assert hasattr(trainer, owner), f"{RELEASE}: the Trainer has no {owner}"
    for name in ATTRIBUTES[owner]:
        assert hasattr(getattr(trainer, owner), name), f"{RELEASE}: {owner} has no {name}"


OF_A_TRAINING = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_train_batch_size")
"""Private attributes of a Trainer that has trained."""


def test_attributes_of_a_training_exist(tmp_path):
    """After a training, a Trainer has the attributes that MFTrainer uses."""
    trainer = train(new_trainer(Trainer, tmp_path, max_steps=1)).trainer

    for name in (*OF_A_TRAINING, "model_init"):
        assert hasattr(trainer, name), f"{RELEASE}: the Trainer has no {name} after training"
    assert trainer._tr_loss.shape == (), f"{RELEASE}: _tr_loss is not a scalar"


def test_events_that_are_waited_for_exist():
    """Callbacks have the events that MFTrainer uses, and ``call_event`` sends them."""
    for event in ("on_train_begin", "on_epoch_begin", "on_optimizer_step", "on_step_end"):
        assert hasattr(TrainerCallback, event), f"{RELEASE}: callbacks have no {event}"
        source = textwrap.dedent(inspect.getsource(vars(CallbackHandler)[event]))
        assert "self.call_event(" in source, f"{RELEASE}: {event} does not go through call_event"


def test_our_own_handler_takes_what_the_trainer_s_does():
    """``StepCallbackHandler.call_event`` has the parameters of the Trainer's handler."""
    assert parameters(StepCallbackHandler.call_event).startswith(
        parameters(CallbackHandler.call_event).removesuffix("**kwargs")
    )


def test_control_has_the_switches_that_are_set():
    """`TrainerControl` has the switches that MFTrainer sets; the default optimizer is fused."""
    for name in ("should_save", "should_training_stop", "should_evaluate"):
        assert hasattr(TrainerControl(), name), f"{RELEASE}: TrainerControl has no {name}"
    default = inspect.signature(TrainingArguments).parameters["optim"]
    assert "fused" in str(default.default), f"{RELEASE}: the default optimizer is {default.default}"
