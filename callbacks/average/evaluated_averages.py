"""Averages in a model while a Trainer evaluates it, and never while it trains or saves."""

import contextlib
from collections.abc import Mapping
from typing import Any, final

from torch import nn
from transformers import TrainerControl

from mfwrap import ExponentialMovingAverage

__all__ = ["EvaluatedAverages"]


@final
class EvaluatedAverages:
    """Hold averages in a model from before an evaluation until it is over.

    A Trainer says when one dataset has been evaluated, and not whether another one follows. So
    with several of them the averages stay until the model is next saved, loaded or trained;
    ``state_dict`` and ``load_state_dict`` of the model put the raw weights back first.
    """

    def __init__(self) -> None:
        self._swap = contextlib.ExitStack()
        self._hooks = contextlib.ExitStack()
        self._control: TrainerControl | None = None
        self._step: int | None = None
        self._are_held = False

    def hold(
        self, ema: ExponentialMovingAverage, model: nn.Module, step: int, control: TrainerControl
    ) -> None:
        """Write the averages into the model, for the evaluation of a step that comes now.

        Args:
            ema: Whose averages.
            model: That is evaluated.
            step: Updates so far.
            control: Says whether an evaluation is still due; the Trainer takes that back when the
                first dataset has been evaluated.
        """
        self.end()
        self._swap.enter_context(ema.swap())
        before_saving = model.register_state_dict_pre_hook(self._before_saving)
        before_loading = model.register_load_state_dict_pre_hook(self._before_loading)
        self._hooks.callback(before_saving.remove)
        self._hooks.callback(before_loading.remove)
        self._are_held, self._control, self._step = True, control, step

    def put_back(self) -> None:
        """Put the raw weights back, if averages are held."""
        # The hooks stay: one of them may be what calls this, and torch is going through them.
        self._are_held = False
        self._swap.close()

    def end(self) -> None:
        """Put the raw weights back: no more dataset is evaluated at this step."""
        self.put_back()
        self._hooks.close()
        self._step = None

    def evaluated(self, metrics: Mapping[str, Any] | None, step: int) -> bool:
        """Put the raw weights back if the dataset that was evaluated is the only one.

        Args:
            metrics: Of the dataset. Those of one among several bear its name.
            step: Updates so far.

        Returns:
            Whether it saw what it should have; ``False`` if the raw weights have been put back
            before a dataset of the same evaluation.
        """
        saw_averages = self._are_held or self._step != step
        times = [name for name in metrics or () if name.endswith("_runtime")]
        if not times or "eval_runtime" in times:
            self.end()
        return saw_averages

    def _before_saving(self, *_: Any) -> None:
        # What evaluates the first dataset may itself ask for the state, and is to get averages.
        if self._control is None or not self._control.should_evaluate:
            self.put_back()

    def _before_loading(self, *_: Any) -> None:
        self.put_back()
