"""Programs in which two ranks train with callbacks of MindFormers' PyNative trainer."""

from typing import Any

import torch

from mfwrap.callbacks import PyNativeCallback, adapt_pynative
from mfwrap.trainer import MFTrainer
from support.pynative_callbacks import RateRecorder, regression

__all__ = ["refuse_a_lone_callback", "train_with_pynative"]


class _Groups(PyNativeCallback):
    """Use the group of ranks as MindFormers' own callback does."""

    error = ""

    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Note the error of a comparison."""
        group = kwargs.get("metric_reduce_group")
        size = kwargs.get("metric_reduce_group_size")
        try:
            if group is not None and (size is None or size > 1):
                self.error = "none"
        except RuntimeError as error:
            self.error = str(error)


def train_with_pynative(_rank: int, folder: str) -> dict[str, Any]:
    """Train; return what the callback got, and the loss of each micro-batch of this rank."""
    recorder, groups = RateRecorder(), _Groups()
    trainer = regression(
        MFTrainer,
        folder,
        [adapt_pynative(recorder), adapt_pynative(groups)],
        ddp_backend="gloo",
    )
    trainer.train()
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "losses": torch.stack(recorder.losses),
        "micro_losses": torch.stack(model.losses),
        "error": groups.error,
    }


def refuse_a_lone_callback(rank: int, folder: str) -> str:
    """Train with a callback on rank 0 only; return the error message."""
    callbacks = [adapt_pynative(RateRecorder())] if rank == 0 else []
    trainer = regression(MFTrainer, folder, callbacks, ddp_backend="gloo")
    try:
        trainer.train()
    except RuntimeError as error:
        return str(error)
    return ""
