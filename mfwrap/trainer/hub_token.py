"""Keep the access token of the hub out of the files that a Trainer writes and pushes."""

import contextlib
from collections.abc import Iterator
from typing import Any, final

from transformers import TrainingArguments


@final
class _UnsavedToken(str):
    """An access token that is pickled as None."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any, /) -> tuple[Any, ...]:
        del protocol
        return type(None), ()


@contextlib.contextmanager
def without_saved_token(args: TrainingArguments) -> Iterator[None]:
    """Within the block, leave ``hub_token`` out where training arguments are pickled.

    The Trainer pickles its arguments to ``training_args.bin`` beside each model, and pushes the
    file. The token stays usable within the block, so that the Trainer can push with it.

    Args:
        args: Training arguments, whose ``hub_token`` is replaced within the block.
    """
    token = args.hub_token
    args.hub_token = None if token is None else _UnsavedToken(token)
    try:
        yield
    finally:
        args.hub_token = token
