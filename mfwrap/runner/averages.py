"""Find the averaged weights of a finished training."""

import warnings
from pathlib import Path
from typing import Any

from mfwrap.accelerate.state import has_average, saved_average
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback
from mfwrap.callbacks.average.files import has_state, read_state
from mfwrap.collectives import gather_objects, raising_together


def average_of(trainer: Any) -> ExponentialMovingAverage | None:
    """Return the average that belongs to the weights of a finished training; ``None`` without one.

    If the Trainer has loaded the weights of the best checkpoint, the average of that checkpoint is
    loaded, too. Call it on every rank.

    Args:
        trainer: An `MFTrainer`, whose model has raw weights.
    """
    callbacks = trainer.callback_handler.callbacks
    found = [trainer.ema, *(one.ema for one in callbacks if isinstance(one, EMACallback))]
    average = next((one for one in found if one is not None), None)
    best = trainer.state.best_model_checkpoint
    if average is not None and best is not None and trainer.args.load_best_model_at_end:
        _load(average, Path(best), trainer)
    return average


def _load(average: ExponentialMovingAverage, checkpoint: Path, trainer: Any) -> None:
    holds = [False, False]
    with raising_together():
        holds = [has_average(checkpoint), has_state(checkpoint)]
    # Nodes with disks of their own may lack the checkpoint.
    in_step, in_callback = (all(each) for each in zip(*gather_objects(holds), strict=True))
    if trainer.ema is not None and in_step:
        saved = saved_average(checkpoint, trainer.attached.attachment)
    elif in_callback:
        saved = read_state(checkpoint)
    else:
        warnings.warn(
            f"{checkpoint} has no average; the averaged weights are those of the last step",
            stacklevel=3,
        )
        return
    # A weight that was frozen when the checkpoint was written has no average there. Its average
    # then is the weight itself, which the Trainer has loaded.
    average.restart()
    own = average.state_dict()
    parts = [part for part in saved if part.startswith("averages") and part in own]
    averages = {part: {**own[part], **saved[part]} for part in parts}
    average.load_state_dict({**saved, **averages})
