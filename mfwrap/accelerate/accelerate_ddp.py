"""DistributedDataParallel as accelerate makes it, with a view of each rank's own gradients."""

from typing import Any, final

from torch.nn.parallel import DistributedDataParallel

from mfwrap.step.local_norms import CommunicationHook, tap

__all__ = ["attached_handler_class", "refuse_second_hook"]


def refuse_second_hook(
    of_handler: object | None, communication_hook: CommunicationHook | None
) -> None:
    """Raise ``ValueError`` if a communication hook is given in two ways.

    Args:
        of_handler: What accelerate's handler has, in words or as it is; ``None`` for none.
        communication_hook: What `attach` was given.
    """
    if of_handler is not None and communication_hook is not None:
        msg = (
            "`communication_hook` must be None with an accelerator whose "
            f"DistributedDataParallelKwargs have a `comm_hook`, got both, the latter {of_handler}"
        )
        raise ValueError(msg)


def attached_handler_class(
    kind: type, communication_hook: CommunicationHook | None = None
) -> type[Any]:
    """Return the subclass of accelerate's handler whose hook comes after the local norms.

    Args:
        kind: The class of the handler, ``DistributedDataParallelKwargs``.
        communication_hook: For a handler that has none.
    """

    def register_comm_hook(handler: Any, model: DistributedDataParallel) -> None:
        recorder = _Recorder()
        kind.register_comm_hook(handler, recorder)  # type: ignore[attr-defined]
        refuse_second_hook(recorder.hook and handler.comm_hook, communication_hook)
        tap(model, recorder.hook or communication_hook)

    return type(f"Attached{kind.__name__}", (kind,), {"register_comm_hook": register_comm_hook})


@final
class _Recorder:
    """Takes a communication hook in a model's place: which one it is only accelerate knows."""

    hook: CommunicationHook | None = None

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.hook = state, hook
