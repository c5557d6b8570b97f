"""Save and restore the weights that an optimizer trains outside of the Trainer's model.

A loss may have weights of its own, such as the classifier of sentence-transformers' `SoftmaxLoss`
or a learned temperature. The optimizer trains them, but the Trainer saves only its model, so they
would start again at a resume.
"""

import logging
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.trainer.view import TrainerView, trains_shards

_LOG = logging.getLogger(__name__)

_FILE = "mfwrap_outer_weights.safetensors"


def save_outer_weights(trainer: TrainerView, folder: Path) -> None:
    """Write the weights into a checkpoint, on the rank that saves; do nothing if there are none.

    Args:
        trainer: The trainer.
        folder: Folder of the checkpoint.
    """
    weights = _outer_weights(trainer)
    if weights and trainer.args.should_save:
        copies = {
            name: weight.detach().cpu().clone().contiguous() for name, weight in weights.items()
        }
        save_file(copies, folder / _FILE)


def restore_outer_weights(trainer: TrainerView, folder: Path) -> None:
    """Restore the weights that `save_outer_weights` wrote.

    Args:
        trainer: The trainer, with its optimizer.
        folder: Folder of the checkpoint. A warning says if it does not hold the weights.

    Raises:
        ValueError: If the shapes differ.
    """
    weights = _outer_weights(trainer)
    if not weights:
        return
    if not (folder / _FILE).is_file():
        _LOG.warning(
            "%s does not hold the %d weights that the optimizer trains outside of the model, for "
            "example in the loss: they start again from their present values",
            folder,
            len(weights),
        )
        return
    saved = load_file(folder / _FILE)
    shapes, expected = ({n: list(w.shape) for n, w in each.items()} for each in (saved, weights))
    if shapes != expected:
        msg = (
            f"cannot resume from {folder}: the weights in {_FILE} have the shapes {shapes}, but "
            f"those that the optimizer trains outside of the model have {expected}"
        )
        raise ValueError(msg)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name])


def _outer_weights(trainer: TrainerView) -> dict[str, Tensor]:
    """Return the weights by the numbers of their group and of their place in it."""
    if trains_shards(trainer):
        return {}
    inner = {id(weight) for weight in trainer.model.parameters()}
    return {
        f"{number}/{place}": weight
        for number, group in enumerate(unwrapped_optimizer(trainer.optimizer).param_groups)
        for place, weight in enumerate(group["params"])
        if id(weight) not in inner
    }
