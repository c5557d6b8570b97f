"""Build a callback from functions."""

from collections.abc import Callable
from typing import final

from mfwrap.arguments import check_callable
from mfwrap.model import Callback, RunContext

Hook = Callable[[RunContext], object]
"""Called with the context of the run; its result is ignored."""


@final
class LambdaCallback(Callback):
    """Call one function per event.

    Source: MindSpore, ``train.LambdaCallback``.

    Args:
        on_train_epoch_begin: Called before each epoch of training.
        on_train_epoch_end: Called after each epoch of training.
        on_train_step_begin: Called before each step of training.
        on_train_step_end: Called after each step of training.
        on_train_begin: Called before training.
        on_train_end: Called after training.
        on_eval_epoch_begin: Called before the pass over the evaluation data.
        on_eval_epoch_end: Called after the pass over the evaluation data.
        on_eval_step_begin: Called before each batch of an evaluation.
        on_eval_step_end: Called after each batch of an evaluation.
        on_eval_begin: Called before an evaluation.
        on_eval_end: Called after an evaluation.

    Raises:
        TypeError: If an argument is not callable.

    Example:
        >>> print_step = LambdaCallback(
        ...     on_train_step_end=lambda run: print(run.original_args().cur_step_num)
        ... )
    """

    def __init__(
        self,
        *,
        on_train_epoch_begin: Hook | None = None,
        on_train_epoch_end: Hook | None = None,
        on_train_step_begin: Hook | None = None,
        on_train_step_end: Hook | None = None,
        on_train_begin: Hook | None = None,
        on_train_end: Hook | None = None,
        on_eval_epoch_begin: Hook | None = None,
        on_eval_epoch_end: Hook | None = None,
        on_eval_step_begin: Hook | None = None,
        on_eval_step_end: Hook | None = None,
        on_eval_begin: Hook | None = None,
        on_eval_end: Hook | None = None,
    ) -> None:
        given = {name: hook for name, hook in locals().items() if name.startswith("on_")}
        for name, hook in given.items():
            if hook is not None:
                check_callable(name, hook)
                setattr(self, name, hook)
