"""A callback made of functions."""

from collections.abc import Callable
from typing import final

from mfwrap.model import Callback, RunContext

__all__ = ["LambdaCallback"]

Hook = Callable[[RunContext], object]
"""Called with the run; what it returns is ignored."""


@final
class LambdaCallback(Callback):
    """Call a function at each event that one is given for.

    Source: MindSpore, ``train.LambdaCallback``.

    Args:
        on_train_epoch_begin: As in `Callback`, like all others.
        on_train_epoch_end: See there.
        on_train_step_begin: See there.
        on_train_step_end: See there.
        on_train_begin: See there.
        on_train_end: See there.
        on_eval_epoch_begin: See there.
        on_eval_epoch_end: See there.
        on_eval_step_begin: See there.
        on_eval_step_end: See there.
        on_eval_begin: See there.
        on_eval_end: See there.

    Raises:
        TypeError: If one cannot be called.

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
        hooks = {
            "on_train_epoch_begin": on_train_epoch_begin,
            "on_train_epoch_end": on_train_epoch_end,
            "on_train_step_begin": on_train_step_begin,
            "on_train_step_end": on_train_step_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_eval_epoch_begin": on_eval_epoch_begin,
            "on_eval_epoch_end": on_eval_epoch_end,
            "on_eval_step_begin": on_eval_step_begin,
            "on_eval_step_end": on_eval_step_end,
            "on_eval_begin": on_eval_begin,
            "on_eval_end": on_eval_end,
        }
        for name, hook in hooks.items():
            if hook is None:
                continue
            if not callable(hook):
                msg = f"`{name}` must be callable or None, got {type(hook).__name__}"
                raise TypeError(msg)
            setattr(self, name, hook)
