"""Random numbers of batches that are made before they are trained on."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self, final

from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import Sampler

from mfwrap.checkpoints.random_states import HostStates

__all__ = ["DataPosition"]


class _MadeBatch(NamedTuple):
    number: int
    """Within its epoch and rank, from 0."""

    states: HostStates
    """Of the random generators, just before the batch was made."""


class _Resumed(NamedTuple):
    ahead: _MadeBatch
    restore_rest: Callable[[], None]


@final
class DataPosition:
    """What a data loader draws at random for the batches of an epoch, so that it can go on.

    accelerate's loaders make one batch ahead, to know the last one. A checkpoint is written after
    that batch was made and before it was trained on, so a resumed run has to make it again, with
    the numbers that it was made with, and must go on with those that came after.

    Only loaders without workers draw from the generators of the process. Not covered: data sets
    that are iterated over, and accelerate's dispatcher, where rank 0 draws for all.
    """

    def __init__(self) -> None:
        self._watched: Any = None
        self._made: _MadeBatch | None = None
        self._resumed: _Resumed | None = None
        self.goes_on = False
        """Whether this epoch goes on with the numbers of a checkpoint."""

    def watch(self, loader: Any) -> None:
        """Note the states of the generators before each batch of a loader's next epochs."""
        self.release()
        sampler = getattr(loader, "batch_sampler", None)
        draws_here = getattr(loader, "num_workers", 0) == 0
        dispatched = isinstance(loader, DataLoaderDispatcher)
        # Anything that can be iterated over may stand for a sampler; a list takes no class.
        if draws_here and not dispatched and isinstance(sampler, Sampler):
            self._watched = sampler
            sampler.__class__ = _watched_class(type(sampler))
            self._watched.position = self

    def release(self) -> None:
        """Give the sampler back as it was."""
        if self._watched is not None:
            self._watched.__class__ = type(self._watched).unwatched
            del self._watched.position
        self._watched = self._made = self._resumed = None
        self.goes_on = False

    def resume(self, saved: Mapping[str, Any] | None, restore_rest: Callable[[], None]) -> None:
        """Let the coming epoch go on where a checkpoint was written.

        Args:
            saved: What `state_dict` returned.
            restore_rest: Sets the generators to what they were when it was written.
        """
        if saved is not None and self._watched is not None:
            ahead = _MadeBatch(saved["batch"], HostStates.decoded(saved["random_states"]))
            self._resumed = _Resumed(ahead, restore_rest)

    def state_dict(self) -> dict[str, Any] | None:
        """Return number and random states of the batch that was made last, as JSON can hold it.

        ``None`` if there is none, or if no one watches.
        """
        if self._made is None:
            return None
        return {"batch": self._made.number, "random_states": self._made.states.encoded()}

    def before_batch(self, number: int) -> None:
        """Take note of the states of the generators, resumed ones first."""
        if self._resumed is not None and number == self._resumed.ahead.number:
            self._resumed.ahead.states.restore()
            self.goes_on = True
        elif self.goes_on:
            self._restore_rest()
        self._made = _MadeBatch(number, HostStates.now())

    def after_batches(self) -> None:
        """Go on with what came after the batches, if the last one was made ahead."""
        if self.goes_on:
            self._restore_rest()

    def _restore_rest(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.restore_rest()


def _watched_class(sampler_class: Any) -> Any:
    class Watched(sampler_class):  # type: ignore[misc]
        """A sampler that tells, before it hands out the indices of a batch."""

        unwatched = sampler_class
        position: DataPosition

        def __iter__(self: Self) -> Iterator[Any]:
            for number, indices in enumerate(super().__iter__()):
                self.position.before_batch(number)
                yield indices
            self.position.after_batches()

    Watched.__name__, Watched.__qualname__ = sampler_class.__name__, sampler_class.__qualname__
    return Watched
