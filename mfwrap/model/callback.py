"""MindSpore's callbacks: what they are told of a run, and how they ask it to stop."""

from types import TracebackType
from typing import Any, Self, final

__all__ = ["Callback", "CallbackParameters", "RunContext"]


@final
class CallbackParameters(dict[str, Any]):
    """What a callback is told of a run, by key and by attribute.

    Source: MindSpore's ``cb_params``, where a missing attribute raises ``KeyError``, so that
    ``hasattr`` and a default of ``getattr`` fail.

    Example:
        >>> parameters = CallbackParameters(cur_step_num=3)
        >>> parameters.cur_step_num, parameters.get("metrics"), hasattr(parameters, "metrics")
        (3, None, False)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            msg = f"this run tells its callbacks no `{name}`, but {sorted(self)}"
            raise AttributeError(msg) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


@final
class RunContext:
    """What a callback is given: facts of the run, and a way to stop it.

    Source: MindSpore, ``train.RunContext``.

    Args:
        original_args: What the run tells its callbacks; changed in place as it goes on.
    """

    def __init__(self, original_args: CallbackParameters) -> None:
        self._original_args = original_args
        self._stop_requested = False

    def original_args(self) -> CallbackParameters:
        """Return what the run tells its callbacks.

        In a training: ``network``, ``train_network``, ``optimizer``, ``loss_fn``, ``epoch_num``,
        ``batch_num``, ``cur_epoch_num`` and ``cur_step_num`` (from 1), ``net_outputs`` (tensors on
        the training device, which wait when they are read), ``train_dataset``, ``list_callback``,
        ``mode`` and, after an evaluation, ``metrics`` and ``eval_results``.
        """
        return self._original_args

    def request_stop(self) -> None:
        """Ask the run to stop: after this step, or after this epoch if it is ending."""
        self._stop_requested = True

    def get_stop_requested(self) -> bool:
        """Return whether a callback has asked the run to stop."""
        return self._stop_requested


class Callback:
    """What is called in the course of a run; each method does nothing until it is overridden.

    ``on_train_*`` is called by `Model.train` and `Model.fit`, ``on_eval_*`` by `Model.eval` and
    `Model.fit`. Unless they are overridden, both call the older names ``begin``, ``epoch_begin``,
    ``step_begin``, ``step_end``, ``epoch_end`` and ``end``, which cannot tell the two apart and are
    therefore refused by `Model.fit`. A callback is entered before a run and left after it, also
    when the run raises.

    Source: MindSpore, ``train.Callback``.

    Example:
        >>> class StopAtStep(Callback):
        ...     def on_train_step_end(self, run_context):
        ...         if run_context.original_args().cur_step_num == 3:
        ...             run_context.request_stop()
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def begin(self, run_context: RunContext) -> None:
        """Called before a run."""

    def epoch_begin(self, run_context: RunContext) -> None:
        """Called before an epoch."""

    def step_begin(self, run_context: RunContext) -> None:
        """Called before a step."""

    def step_end(self, run_context: RunContext) -> None:
        """Called after a step."""

    def epoch_end(self, run_context: RunContext) -> None:
        """Called after an epoch."""

    def end(self, run_context: RunContext) -> None:
        """Called after a run."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """Called before a training."""
        self.begin(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Called before an epoch of a training."""
        self.epoch_begin(run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Called before an update."""
        self.step_begin(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Called after an update."""
        self.step_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Called after an epoch of a training, and after the evaluation that is due then."""
        self.epoch_end(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        """Called after a training, also one that was asked to stop."""
        self.end(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Called before an evaluation."""
        self.begin(run_context)

    def on_eval_epoch_begin(self, run_context: RunContext) -> None:
        """Called before the pass over the data of an evaluation."""
        self.epoch_begin(run_context)

    def on_eval_step_begin(self, run_context: RunContext) -> None:
        """Called before a batch of an evaluation."""
        self.step_begin(run_context)

    def on_eval_step_end(self, run_context: RunContext) -> None:
        """Called after a batch of an evaluation."""
        self.step_end(run_context)

    def on_eval_epoch_end(self, run_context: RunContext) -> None:
        """Called after the pass over the data of an evaluation."""
        self.epoch_end(run_context)

    def on_eval_end(self, run_context: RunContext) -> None:
        """Called after an evaluation, when its metrics are known."""
        self.end(run_context)
