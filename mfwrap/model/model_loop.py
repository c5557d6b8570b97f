"""The loop of `Model`: epochs, steps, evaluations."""

from collections.abc import Sequence
from typing import NamedTuple

from mfwrap.arguments import check_int, described
from mfwrap.model.data import Batches, pair_of
from mfwrap.model.evaluation import Evaluation
from mfwrap.model.model_updates import Updates
from mfwrap.model.run import ModelRun

__all__ = ["Validation", "check_epochs", "checked_frequency", "train"]


class Validation(NamedTuple):
    """An evaluation and the epochs that end with it."""

    evaluation: Evaluation
    frequency: int | Sequence[int]
    """Epochs from one to the next, or the numbers of epochs, from 1."""

    def is_due(self, epoch: int) -> bool:
        """Return whether an epoch, which has a number from 1, ends with it."""
        if isinstance(self.frequency, int):
            return epoch % self.frequency == 0
        return epoch in self.frequency


def train(
    run: ModelRun,
    updates: Updates,
    batches: Batches,
    validation: Validation | None,
    epochs: range,
    *,
    takes_pairs: bool,
) -> None:
    """Train until the epochs are done or a callback asks for the end.

    An epoch that is broken off ends all the same, with the evaluation that is due.

    Args:
        run: Is told of everything.
        updates: Does one update.
        batches: The data.
        validation: ``None`` for none.
        epochs: Numbers of the epochs, from 1.
        takes_pairs: A batch must have two columns.
    """
    with updates, run:
        run.begin()
        for epoch in epochs:
            run.begin_epoch(epoch)
            for batch in batches.epoch():
                call = pair_of("train_dataset", batch) if takes_pairs else batch
                run.begin_step()
                run.end_step(updates(call))
                if run.epoch_stops:
                    break
            updates.flush()
            evaluates = validation is not None and validation.is_due(epoch)
            run.end_epoch(evaluates=evaluates)
            if validation is not None and evaluates:
                run.evaluated(*validation.evaluation.run(run.mindspore_callbacks))
            if run.stops:
                break
        run.end()


def check_epochs(epoch: int, initial_epoch: int) -> None:
    """Check the number of epochs, and of those that are done.

    Raises:
        TypeError: If one is not an int.
        ValueError: If `epoch` is below 1, or `initial_epoch` not in ``[0, epoch)``.
    """
    check_int("epoch", epoch)
    if isinstance(initial_epoch, bool) or not isinstance(initial_epoch, int):
        msg = f"`initial_epoch` must be an int, got {described(initial_epoch)}"
        raise TypeError(msg)
    if not 0 <= initial_epoch < epoch:
        msg = f"`initial_epoch` must be in [0, {epoch}), got {initial_epoch}"
        raise ValueError(msg)


def checked_frequency(frequency: object) -> int | Sequence[int]:
    """Return how often an evaluation is due, if that can be.

    Raises:
        TypeError: If it is neither an int nor a list of them.
        ValueError: If one is below 1.
    """
    if isinstance(frequency, (list, tuple)):
        return [check_int("valid_frequency", number) for number in frequency]
    return check_int("valid_frequency", frequency)
