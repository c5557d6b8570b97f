"""Find the weights of a finished training: of which step they are, and their average."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from mfwrap.accelerate.state import has_average, saved_average
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback
from mfwrap.callbacks.average.files import has_state, read_state
from mfwrap.checkpoints.run_folders import step_of_checkpoint
from mfwrap.collectives import gather_objects, raising_together


class FinalAverage(NamedTuple):
    """The averaged weights of a finished training."""

    weights: ExponentialMovingAverage
    step: int
    """Number of updates that they are the average of."""


def best_checkpoint(trainer: Any) -> Path | None:
    """Return the checkpoint whose weights the model has after the training; ``None`` for the last.

    Args:
        trainer: An `MFTrainer` whose training has finished.
    """
    best = trainer.state.best_model_checkpoint
    return Path(best) if best is not None and trainer.args.load_best_model_at_end else None


def average_of(trainer: Any) -> FinalAverage | None:
    """Return the average that belongs to the weights of a finished training; ``None`` without one.

    If the Trainer has loaded the weights of the best checkpoint, the average of that checkpoint is
    loaded, too. Call it on every rank.

    Args:
        trainer: An `MFTrainer`, whose model has raw weights.
    """
    callbacks = trainer.callback_handler.callbacks
    found = [trainer.attached.ema, *(one.ema for one in callbacks if isinstance(one, EMACallback))]
    average = next((one for one in found if one is not None), None)
    if average is None:
        return None
    best = best_checkpoint(trainer)
    if best is not None and _load(average, best, trainer):
        return FinalAverage(average, step_of_checkpoint(best))
    return FinalAverage(average, trainer.state.global_step)


def _load(average: ExponentialMovingAverage, checkpoint: Path, trainer: Any) -> bool:
    """Load the average of a checkpoint; return False, with a warning, if it has none."""
    holds = [False, False]
    with raising_together():
        holds = [has_average(checkpoint), has_state(checkpoint)]
    # Nodes with disks of their own may lack the checkpoint.
    in_step, in_callback = (all(each) for each in zip(*gather_objects(holds), strict=True))
    if trainer.attached.ema is not None and in_step:
        saved = saved_average(checkpoint, trainer.attached.attachment)
    elif in_callback:
        saved = read_state(checkpoint)
    else:
        warnings.warn(
            f"{checkpoint} has no average; the averaged weights are those of the last step",
            stacklevel=3,
        )
        return False
    # A weight that was frozen when the checkpoint was written has no average there. Its average
    # then is the weight itself, which the Trainer has loaded.
    average.restart()
    own = average.state_dict()
    parts = [part for part in saved if part.startswith("averages") and part in own]
    averages = {part: {**own[part], **saved[part]} for part in parts}
    average.load_state_dict({**saved, **averages})
    return True
