"""Private names of transformers' Trainer and models, and the versions that have a Trainer to wrap.

Importing this module does not import transformers. The methods of the Trainer that `MFTrainerMixin`
overrides are not listed here: tests/unit/trainer/test_surface.py compares their signatures.
"""

import functools
from collections.abc import Callable, Collection, Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, final

from mfwrap.compatibility.foreign import ForeignName, ReleaseError, is_installed

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TRAINER_RELEASE = "5.5"
"""First release of transformers whose Trainer `MFTrainerMixin` can wrap.

Before 5.3, the Trainer's loop is one function. 5.3 and 5.4 have the methods, and are not tested.
"""

_TRAINER = "transformers.trainer"
_LIBRARIES = {"mfwrap", "peft", "transformers"}

NAMES = (
    ForeignName(_TRAINER, "Trainer._get_output_dir"),
    ForeignName(_TRAINER, "Trainer._load_from_checkpoint"),
    ForeignName(_TRAINER, "Trainer._load_optimizer_and_scheduler"),
    ForeignName(_TRAINER, "Trainer._save"),
    ForeignName(_TRAINER, "Trainer._save_checkpoint"),
    ForeignName(_TRAINER, "Trainer._tr_loss", since="5.3"),
    ForeignName(_TRAINER, "Trainer._globalstep_last_logged"),
    ForeignName(_TRAINER, "Trainer._total_loss_scalar"),
    ForeignName(_TRAINER, "Trainer._get_num_items_in_batch"),
    ForeignName(_TRAINER, "Trainer._prepare_inputs"),
    ForeignName(_TRAINER, "Trainer._save_optimizer_and_scheduler"),
    ForeignName(_TRAINER, "Trainer._push_from_checkpoint"),
    ForeignName(_TRAINER, "Trainer._train_batch_size"),
    ForeignName(_TRAINER, "Trainer._mixed_mesh_grads", since="5.17"),
    ForeignName("transformers.modeling_utils", "PreTrainedModel._keys_to_ignore_on_save"),
    ForeignName(
        "transformers.distributed.pipeline_parallel",
        "apply_pipeline_parallelism._pp_stage",
        since="5.16",
    ),
    # It was in `transformers.integrations.tensor_parallel` before, or did not exist yet.
    ForeignName(
        "transformers.distributed.tensor_parallel", "ReplicatedWithGradAllReduce", since="5.16"
    ),
)

COUNT_ITEMS = "_get_num_items_in_batch"
"""Method of the Trainer that counts the targets of the micro-batches of an update."""


def check_trainer_release() -> None:
    """Check that the installed transformers has a Trainer that `MFTrainerMixin` can wrap.

    Raises:
        ReleaseError: If transformers is older than `TRAINER_RELEASE`.
    """
    if not is_installed("transformers", TRAINER_RELEASE):
        msg = (
            f"MFTrainer needs transformers {TRAINER_RELEASE} or newer, got "
            f"{version('transformers')}; `mfwrap.accelerate.attach` works with it"
        )
        raise ReleaseError(msg)


@final
class LossSums:
    """The losses that a Trainer has added up during a training.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def since_last_log(self) -> "Tensor":
        """Sum of the losses since the last log, shape ``()``, float32, on the training device."""
        losses: Tensor = self._trainer._tr_loss
        return losses

    @since_last_log.setter
    def since_last_log(self, losses: "Tensor") -> None:
        self._trainer._tr_loss = losses

    @property
    def until_last_log(self) -> float:
        """Sum of the losses before the last log."""
        total: float = self._trainer._total_loss_scalar
        return total

    @until_last_log.setter
    def until_last_log(self, total: float) -> None:
        self._trainer._total_loss_scalar = total

    @property
    def last_logged(self) -> int:
        """Step of the last log."""
        step: int = self._trainer._globalstep_last_logged
        return step

    @last_logged.setter
    def last_logged(self, step: int) -> None:
        self._trainer._globalstep_last_logged = step


def method_of(trainer: Any, name: str) -> Callable[..., Any]:
    """Return a private method of a Trainer: `COUNT_ITEMS`."""
    method: Callable[..., Any] = getattr(trainer, name)
    return method


def prepared_inputs(trainer: Any, batch: Any) -> Any:
    """Return a micro-batch as the Trainer passes it to ``compute_loss``."""
    return trainer._prepare_inputs(batch)


def batch_size_of(trainer: Any) -> int:
    """Return the batch size per device, which may differ from the training arguments."""
    size: int = trainer._train_batch_size
    return size


def push_checkpoint(trainer: Any, folder: str) -> None:
    """Upload a checkpoint as the Trainer does."""
    trainer._push_from_checkpoint(folder)


def save_checkpoint(trainer: Any, trial: Any) -> None:
    """Save a checkpoint of the present step as the Trainer does.

    Args:
        trainer: The trainer.
        trial: Trial of a hyperparameter search; ``None`` without one.
    """
    trainer._save_checkpoint(trainer.model, trial)


def output_folder_of(trainer: Any, trial: Any) -> str:
    """Return the folder in which a Trainer writes its checkpoints.

    Args:
        trainer: The trainer.
        trial: Trial of a hyperparameter search; ``None`` without one.
    """
    folder: str = trainer._get_output_dir(trial)
    return folder


def leave_accumulation_to_trainer(accelerator: Any) -> None:
    """Keep accelerate from dividing losses that the Trainer has divided already.

    Up to 5.5.3, transformers let both divide the loss of a micro-batch by the number of accumulated
    micro-batches, so gradients were too small by that factor. Later releases do what this does.

    Args:
        accelerator: Accelerator that a Trainer has just created.
    """
    accelerator.gradient_accumulation_steps = 1


@functools.cache
def let_cpu_ranks_load() -> None:
    """Let ``torch.load`` move tensors to ``cpu:0`` or ``cpu:1`` as to ``cpu``, in this process.

    Before 5.18, a Trainer on several CPU ranks loads its optimizer's state to such a device, which
    torch does not know. This has no effect with newer releases.
    """
    if not is_installed("transformers", "5.18"):
        from torch.serialization import register_package  # noqa: PLC0415  (slow)

        register_package(1000, lambda _: None, _loaded_to_cpu)


def _loaded_to_cpu(storage: Any, location: str) -> Any:
    return storage if location.startswith("cpu:") else None


def leave_meshes_to_step(trainer: Any) -> None:
    """Keep the Trainer from looking for gradients of several meshes at its first clip."""
    trainer._mixed_mesh_grads = False


_SAVING = ("_save", "save_model")
_LOADING = ("_load_from_checkpoint",)
_OPTIMIZER = ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler")


def has_own(trainer: Any, *names: str, before: type | None = None) -> bool:
    """Return whether a user has replaced a method of a Trainer, in a subclass or on the object.

    Classes of transformers and of mfwrap do not count.

    Args:
        trainer: The trainer.
        names: Names of the methods.
        before: Class whose subclasses are asked about; ``None`` for all classes.
    """
    kinds = type(trainer).__mro__
    kinds = kinds if before is None else kinds[: kinds.index(before)]
    return any(name in vars(trainer) for name in names) or _any_has(kinds, names)


def _any_has(kinds: Iterable[type], names: Collection[str]) -> bool:
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _LIBRARIES]
    return any(name in vars(kind) for kind in own for name in names)


def loads_weights_itself(trainer: Any, *, after: type | None = None) -> bool:
    """Return whether a Trainer loads the weights of a checkpoint by a method of the user's own.

    Args:
        trainer: The trainer.
        after: Class whose ``super()`` is asked about; ``None`` for the trainer itself.
    """
    if after is None:
        return has_own(trainer, *_LOADING)
    kinds = type(trainer).__mro__
    return _any_has(kinds[kinds.index(after) + 1 :], _LOADING)


def saves_weights_itself(trainer: Any) -> bool:
    """Return whether the weights of a checkpoint are saved by a method of the user's own."""
    kinds = type(trainer.model).__mro__
    return has_own(trainer, *_SAVING) or _any_has(kinds, {"save_pretrained"})


def saves_checkpoints_itself(trainer: Any) -> bool:
    """Return whether a Trainer writes its checkpoints by a method of the user's own."""
    return has_own(trainer, "_save_checkpoint")


def completes_checkpoints_itself(trainer: Any) -> bool:
    """Return whether a method of the user's own may do something with a checkpoint's files.

    The Trainers of TRL have such methods, too, which only write a card before they save.
    """
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] != "trl"]
    return "_save_checkpoint" in vars(trainer) or _any_has(kinds, {"_save_checkpoint"})


def saves_optimizer_itself(trainer: Any) -> bool:
    """Return whether a Trainer saves or loads its optimizer by a method of the user's own."""
    return has_own(trainer, *_OPTIMIZER)


def evaluates_batches_itself(trainer: Any, *, after: type) -> bool:
    """Return whether a method or function of the user's own computes the loss of an evaluation.

    Args:
        trainer: The trainer.
        after: Class whose ``super().prediction_step`` is asked about.
    """
    kinds = type(trainer).__mro__
    is_replaced = _any_has(kinds[kinds.index(after) + 1 :], {"prediction_step"})
    has_function = trainer.compute_loss_func is not None
    return is_replaced or has_function or has_own(trainer, "compute_loss")


def makes_batches_itself(trainer: Any) -> bool:
    """Return whether a Trainer may train on other rows than those of its loader's batches."""
    return has_own(trainer, "_prepare_inputs", "get_batch_samples")


def unsaved_keys(network: "nn.Module") -> set[str]:
    """Return the names of the weights that a model of transformers does not save."""
    return set(getattr(network, "_keys_to_ignore_on_save", None) or ())


def shapes_in_original_format(network: "nn.Module") -> "dict[str, torch.Size]":
    """Return the shapes of weights by the names of a model's format on the hub.

    transformers converts some models when it loads and saves them: it renames, joins or splits
    weights. The result is empty if it does not convert this one.
    """
    from transformers import PreTrainedModel  # noqa: PLC0415  (see above)

    try:
        from transformers.core_model_loading import (  # noqa: PLC0415  (see above)
            revert_weight_conversion,
        )
    except ImportError:  # a release without conversions
        return {}
    if not isinstance(network, PreTrainedModel):
        return {}
    own: dict[str, Tensor] = {name: each.to("meta") for name, each in network.state_dict().items()}
    converted = revert_weight_conversion(network, own)
    if converted.keys() == own.keys():
        return {}
    return {name: weight.shape for name, weight in converted.items()}


def pipeline_stage_of(module: "nn.Module") -> Any:
    """Return the stage into which transformers has put a module; ``None`` if it is in no stage."""
    return vars(module).get("_pp_stage")


def reduces_partial_gradients(function: Any) -> bool:
    """Return whether a hook or a forward is of ``ReplicatedWithGradAllReduce``."""
    # Do not import the class, whose module differs between versions.
    return getattr(function, "__qualname__", "").startswith("ReplicatedWithGradAllReduce.")
