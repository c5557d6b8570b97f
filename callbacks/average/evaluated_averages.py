"""Hold averaged weights in a model while a Trainer evaluates it."""

import contextlib
from collections.abc import Mapping
from typing import Any, final

from torch import nn
from transformers import TrainerControl

from mfwrap import ExponentialMovingAverage
from mfwrap.tensors.module_hooks import keep_out_of_copies


@final
class EvaluatedAverages:
    """Hold averaged weights in a model while a Trainer evaluates it.

    An `MFTrainer` says when an evaluation begins and ends. A stock Trainer does not: with a single
    data set, the raw weights are restored as soon as it has been evaluated. With several data sets,
    the averages stay in the model until the caller calls `end`, or until the model's
    ``state_dict`` is called. Under both Trainers they stay until ``load_state_dict`` is called.
    Hooks on these two methods restore the raw weights first.
    """

    def __init__(self) -> None:
        self._swap = contextlib.ExitStack()
        self._hooks = contextlib.ExitStack()
        self._ema: ExponentialMovingAverage | None = None
        self._control: TrainerControl | None = None
        self._step: int | None = None
        self._are_held = False

    def hold(
        self,
        ema: ExponentialMovingAverage,
        model: nn.Module,
        step: int,
        control: TrainerControl | None,
    ) -> None:
        """Put the averages into the model for the evaluation that follows.

        Args:
            ema: Average of the weights of `model`.
            model: Model that is evaluated.
            step: Number of updates so far.
            control: Control of a stock Trainer. Its ``should_evaluate`` is true until the first
                data set has been evaluated. ``None`` if the caller ends the evaluation with `end`.
        """
        self.end()
        self._swap.enter_context(ema.swap())
        hooks = [model.register_load_state_dict_pre_hook(self._before_loading)]
        if control is not None:
            hooks.append(model.register_state_dict_pre_hook(self._before_saving))
        keep_out_of_copies(model, *hooks)
        for hook in hooks:
            self._hooks.callback(hook.remove)
        self._are_held, self._ema, self._control, self._step = True, ema, control, step

    def put_back(self) -> None:
        """Restore the raw weights if averages are held; the hooks stay until `end`."""
        # Do not remove the hooks here: they call this method while torch iterates over the dict of
        # the model's hooks, and a change of that dict could raise a RuntimeError.
        self._are_held = False
        self._swap.close()

    def end(self) -> None:
        """End the evaluation: restore the raw weights and remove the hooks."""
        self.put_back()
        self._hooks.close()
        self._step = None

    def evaluated(self, metrics: Mapping[str, Any] | None, step: int) -> bool:
        """Note that a data set was evaluated; restore the raw weights if no other one follows.

        Without a `control`, the raw weights are left to `end`.

        Args:
            metrics: Metrics of the data set. If they contain ``eval_runtime``, this is the only
                data set. With several data sets, the name is ``eval_<data set>_runtime``.
            step: Number of updates so far.

        Returns:
            False if the data set was evaluated with raw weights by mistake: averages were put into
            the model for this evaluation, but something restored the raw weights too early.
            Otherwise True, also if the evaluation was meant to use raw weights.
        """
        saw_averages = self._are_held or self._step != step
        times = [name for name in metrics or () if name.endswith("_runtime")]
        if self._control is not None and (not times or "eval_runtime" in times):
            self.end()
        return saw_averages

    def _before_saving(self, *_: Any) -> None:
        # While `should_evaluate` is true, a call of `state_dict` comes from the evaluation itself
        # and must get the averages. A later call saves the model and must get the raw weights,
        # except in a user's own block of `swap`.
        if self._ema is not None and self._ema.is_swap_nested:
            return
        if self._control is None or not self._control.should_evaluate:
            self._before_loading()

    def _before_loading(self, *_: Any) -> None:
        # In a block of `training_weights` the raw weights are in the model already.
        if self._ema is not None and self._ema.is_swapped:
            self.put_back()
