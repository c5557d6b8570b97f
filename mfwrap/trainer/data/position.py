"""Save and restore a training's position in its data, so that a resume gets the same batches."""

import contextlib
import copy
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from accelerate.state import GradientState
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from mfwrap.arguments import callers_stacklevel, check_bool
from mfwrap.checkpoints.file_formats import DamagedFileError, json_content
from mfwrap.checkpoints.global_batch import GlobalBatch, positive
from mfwrap.checkpoints.held_generators import (
    Generator,
    check_states,
    held_generators,
    restore_generators,
    states_of,
)
from mfwrap.checkpoints.random_states import (
    HostStates,
    check_random_states,
    random_states,
    restore_random_states,
)
from mfwrap.checkpoints.required_files import TRAINER_STATE
from mfwrap.collectives import gather_objects, raising_together
from mfwrap.records.skipped_rows import checked_row
from mfwrap.trainer.data.stateful_loader import (
    check_loader,
    check_place,
    check_stateful_data,
    stateful_base,
)
from mfwrap.trainer.log import check_log
from mfwrap.trainer.row_losses import check_state


@final
class TrainerPosition:
    """Save and restore the position of a training in its data and its log, one file per rank.

    The Trainer itself saves the step and the random states at that step. To continue exactly, a
    resumed training also needs:

    - the random states at the start of the epoch, which decide the order of the data and the seeds
      of the workers;
    - the states of the generators that samplers hold, at the start of the epoch and now;
    - the random states of the batch that was made ahead, and those of the generators that the data
      set and the collator hold (`DataPosition`);
    - the sums of the log (`mfwrap.trainer.log.Losses`).

    Args:
        is_stateful: Whether iterable data keep their place by the state of their loader
            (`mfwrap.trainer.data.stateful_loader`). Otherwise the Trainer reads the batches before
            the place again.
    """

    def __init__(self, *, is_stateful: bool = False) -> None:
        self.is_stateful = check_bool("use_stateful_dataloader", is_stateful)
        """Whether iterable data keep their place by the state of their loader."""
        self.is_placed = False
        """Whether a resume restores the place of a loader within a pass, on any rank; in an epoch,
        whether its loader has done so."""
        self.begins_pass = False
        """Whether a resume with such loaders begins the pass after one that had ended."""
        self._data = DataPosition()
        self._epoch_random_states: dict[str, Any] | None = None
        self._loader: Any = None
        self._samplers: dict[str, object] = {}
        self._epoch_samplers: dict[str, Any] = {}
        self._on_other_ranks: dict[str, Any] | None = None
        self.saved: dict[str, Any] | None = None
        """Content of the position file of the resumed checkpoint, with the state of the log.

        ``None`` if the training is not resumed, the checkpoint has no such file, or the first epoch
        has begun."""
        self.resumed_from: Path | None = None
        """Checkpoint that the coming epoch resumes from; ``None`` for any other epoch."""

    def check_data(self, dataset: Any) -> None:
        """Check that training data can keep their place as asked for; see `check_stateful_data`."""
        if self.is_stateful:
            check_stateful_data(dataset)

    @contextlib.contextmanager
    def of_training(self, checkpoint: str | None, args: TrainingArguments) -> Iterator[None]:
        """Keep track of a training within the block; restore random states if it is resumed.

        Args:
            checkpoint: Checkpoint to resume from; ``None`` for a training from the start.
            args: Training arguments, which contain the rank and the number of ranks.
        """
        self.saved = self._epoch_random_states = self.resumed_from = None
        self._on_other_ranks = None
        if checkpoint is not None:
            self.resumed_from = Path(checkpoint)
            self.saved = _read_position(self.resumed_from, args.process_index, args.world_size)
        if self.saved is not None:
            if self.saved["num_ranks"] != args.world_size:
                self._on_other_ranks = self.saved["random_states"]
            # The data loader takes the seed of its shuffling from the generators when it is
            # constructed, before the first epoch begins. So restore the generators already here,
            # to their states at the start of the checkpoint's epoch.
            self._epoch_random_states = self.saved["epoch_random_states"]
            restore_random_states(self.saved["epoch_random_states"])
        if self.is_stateful:
            states = gather_objects(_place_of(self.saved))
            self.begins_pass = "ended" in states
            self.is_placed = "within" in states and not self.begins_pass
        try:
            yield
        finally:
            self._data.release()
            self._loader, self.is_placed, self.begins_pass = None, False, False

    def watching(self, batches: Iterable[tuple[int, Any]]) -> Iterator[Any]:
        """Yield the batches of the epoch that `begin_epoch` has begun; see `DataPosition`.

        Args:
            batches: Indices of the rows of each batch, with the number of the batch in its epoch.
        """
        return self._data.watching(batches)

    def warn_of_repeated_rows(self, args: TrainingArguments, max_steps: int) -> None:
        """Warn if a training of data without a length resumes within a second or later pass.

        The Trainer then skips as many batches of the first pass as it has trained on, finds no
        further batch, and begins the next pass at its first row. Call it before the first epoch.

        Args:
            args: Training arguments, which contain the rank.
            max_steps: Number of updates of the training.
        """
        if self.resumed_from is None or args.ignore_data_skip or args.process_index != 0:
            return
        passes, updates, step = self.done_without_length()
        # The last update of the training may come before that point.
        updates = min(updates, max_steps - step)
        has_ended = self.saved is not None and self.saved.get("pass_has_ended", False)
        if passes and updates and not has_ended:
            warnings.warn(
                f"{self.resumed_from} was written within a second or later pass over training data "
                "without a length, and the Trainer begins this pass again: the rows of its first "
                f"{updates} update(s) are trained on twice; to continue exactly, use data with a "
                "length, or data that repeat their rows in one pass, such as `dataset.repeat(None)`"
                " of datasets",
                stacklevel=callers_stacklevel(),
            )

    def done_without_length(self) -> tuple[int, int, int]:
        """Return what a resumed training of data without a length has done.

        Returns:
            Number of whole passes over the data, updates of the pass after them, and all updates.
            The pass after them may have ended as well; see `begins_pass`.
        """
        if self.resumed_from is None:
            return 0, 0, 0
        state = TrainerState.load_from_json(str(self.resumed_from / TRAINER_STATE))
        # Without a length, a pass counts as one epoch, and each update as a share of `max_steps`.
        passes, part = divmod(float(state.epoch or 0), 1)
        return int(passes), round(part * state.max_steps), state.global_step

    def restore_random_states(self, checkpoint: str, load: Callable[[str], None]) -> None:
        """Restore the random states of a checkpoint, unless that is done already.

        If training resumes in the middle of an epoch, the Trainer restores them after the first
        batches are made. By then `DataPosition` may have restored them, and making the batches has
        advanced them. Restoring them again would repeat random numbers.

        Args:
            checkpoint: Folder of the checkpoint.
            load: Function that takes the folder of a checkpoint and restores the random states that
                the Trainer saved there for this rank.
        """
        if self._data.is_resumed:
            return
        if self._on_other_ranks is None:
            load(checkpoint)
        else:
            restore_random_states(self._on_other_ranks)

    def begin_epoch(
        self,
        loader: Any,
        load_random_states: Callable[[str], None],
        *,
        epoch: float | None,
        skips_data: bool,
    ) -> None:
        """Record the random states at the start of an epoch; restore a checkpoint's states first.

        Args:
            loader: Data loader of the epoch.
            load_random_states: Function that takes the folder of a checkpoint and restores the
                random states that the Trainer saved there.
            epoch: Number of epochs done so far; fractional if training resumes in the middle of an
                epoch.
            skips_data: Whether the Trainer recreates and skips the batches that precede the
                checkpoint.
        """
        saved, self.saved = self.saved, None
        checkpoint, self.resumed_from = self.resumed_from, None
        self._data.watch(loader)
        if self.is_stateful and self._loader is None:
            with raising_together():
                check_loader(loader)
        self._loader = loader
        self._samplers = _samplers(loader)
        is_between_epochs = float(epoch or 0).is_integer() or self.begins_pass
        self.begins_pass = False
        self.is_placed &= saved is not None and skips_data and not is_between_epochs
        if saved is not None:
            name = "sampler_generators" if is_between_epochs else "epoch_sampler_generators"
            restore_generators(self._samplers, saved.get(name, {}))
        if saved is not None and is_between_epochs:
            self._data.restore_makers(saved.get("maker_generators", {}))
        if checkpoint is not None and is_between_epochs:
            self.restore_random_states(str(checkpoint), load_random_states)
        elif checkpoint is not None and saved is not None:
            restore_random_states(saved["epoch_random_states"])
            if skips_data:

                def restore() -> None:
                    load_random_states(str(checkpoint))
                    restore_generators(self._data.makers, saved.get("maker_generators", {}))

                self._data.resume(saved["data"], restore, is_placed=self.is_placed)
        self._epoch_random_states = random_states()
        self._epoch_samplers = self._sampler_states()
        if getattr(loader, "persistent_workers", False) and float(epoch or 0) >= 1:
            self._data.keep_states()

    def save(
        self,
        folder: Path,
        args: TrainingArguments,
        log: Callable[[], Mapping[str, Any]],
        others: Mapping[str, Any],
    ) -> None:
        """Write this rank's file into a checkpoint; does nothing before the first epoch.

        Args:
            folder: Folder of the checkpoint; created if it is missing.
            args: Training arguments, which contain the rank and the number of ranks.
            log: Function that returns the state of the log.
            others: States of `mfwrap.trainer.data.global_batch.TrainerBatch`,
                `mfwrap.trainer.data.skip.DataSkip`, `mfwrap.trainer.data.growth.GrowingBatch`,
                `mfwrap.trainer.row_losses.LossByRow` and
                `mfwrap.trainer.optimizer_settings.OptimizerSettings` by their names in the file.

        Raises:
            ValueError: If JSON cannot hold the state of the data on a rank; raised on all ranks.
        """
        if self._epoch_random_states is None:
            return
        data = self._data.state_dict()
        if self.is_stateful:
            # A data set may put other values into its state than before its first row.
            with raising_together():
                check_place(None if data is None else data["place"])
        content = {
            "num_ranks": args.world_size,
            **others,
            "epoch_random_states": self._epoch_random_states,
            "random_states": random_states(),
            "epoch_sampler_generators": self._epoch_samplers,
            "sampler_generators": self._sampler_states(),
            "maker_generators": states_of(held_generators(self._data.makers)),
            **log(),
            "pass_has_ended": self._pass_has_ended(),
            "data": data,
        }
        # The rank that saves the model may not have made the folder yet.
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _file_name(args.process_index, args.world_size)
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def _pass_has_ended(self) -> bool:
        """Return whether the last batch of a pass over data without a length was read."""
        if self._loader is None or has_length(self._loader):
            return False
        # In a resumed epoch, the Trainer iterates over a loader that it has made of this one.
        loaders = (self._loader, GradientState().active_dataloader)
        return any(getattr(each, "end_of_dataloader", False) for each in loaders)

    def _sampler_states(self) -> dict[str, Any]:
        # Samplers hold the data set. accelerate's own sampler seeds its generator anew in each
        # pass, and has none before its first one.
        found = held_generators(
            self._samplers, but=self._data.makers.values(), opaque=SeedableRandomSampler
        )
        return states_of(found)


def _place_of(saved: Mapping[str, Any] | None) -> str | None:
    """Return whether this rank's loader is within a pass or at its end; ``None`` if unknown."""
    if saved is not None and saved.get("pass_has_ended", False):
        return "ended"
    data = None if saved is None else saved["data"]
    return None if data is None or data.get("place") is None else "within"


def _samplers(loader: Any) -> dict[str, object]:
    """Return what draws the order of a loader's rows, by name.

    accelerate wraps the batch sampler once for several ranks. It is unwrapped here, so that a
    generator has one name on any number of ranks. A batch sampler of the user's own may hold
    another one, too, and a generator beside it.
    """
    batches = getattr(loader, "batch_sampler", None)
    while isinstance(batches, BatchSamplerShard | SkipBatchSampler):
        batches = batches.batch_sampler
    others = {name: getattr(loader, name, None) for name in ("sampler", "generator")}
    return {"batch_sampler": batches, **others}


def _file_name(rank: int, num_ranks: int) -> str:
    return f"mfwrap_position_{rank}.json" if num_ranks > 1 else "mfwrap_position.json"


def read_rank_file(folder: Path, rank: int, num_ranks: int) -> dict[str, Any] | None:
    """Return the content of a rank's position file; ``None`` if this disk has no position file.

    If another number of ranks wrote the checkpoint, the file of its rank 0 is read.

    Raises:
        DamagedFileError: If the file is damaged. The message names it.
    """
    names = [_file_name(rank, num_ranks), _file_name(0, 1), _file_name(0, 2)]
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        return None
    content = _read(path)
    written_by = content["num_ranks"]
    rank_0 = folder / _file_name(0, written_by)
    if written_by != num_ranks and path != rank_0 and rank_0.exists():
        content = _read(rank_0)
    return content


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a position file, after a check of all that a resume needs."""
    content: dict[str, Any] = json_content(path)
    try:
        positive(content["num_ranks"])
        check_random_states(content["epoch_random_states"])
        check_random_states(content["random_states"])
        for name in ("epoch_sampler_generators", "sampler_generators", "maker_generators"):
            check_states(content.get(name, {}))
        check_log(content)
        if content["data"] is not None:
            _check_count(content["data"]["batch"])
            HostStates.decoded(content["data"]["random_states"])
            check_states(content["data"].get("makers", {}))
        check_state(content.get("loss_by"))
        _check_batch(content["global_batch"])
        _check_count(content.get("samples") or 0)
        _check_count(abs(content["data_skip"]["offset"]))
        _check_count(content["data_skip"]["steps"] or 0)
        for row in content["data_skip"]["rows"]:
            checked_row(*row)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"is damaged ({type(error).__name__}: {error}); resume from another checkpoint"
        raise DamagedFileError(path, reason) from error
    return content


def _check_count(number: Any) -> None:
    if type(number) is not int or number < 0:
        msg = f"expected an int >= 0, got {number!r:.80}"
        raise ValueError(msg)


def _check_batch(state: Mapping[str, Any]) -> None:
    """Check the state of a `mfwrap.trainer.data.global_batch.TrainerBatch`."""
    GlobalBatch.restored(state["sizes"])
    positive(state["num_ranks"])
    for name in ("updates_per_epoch", "group_size"):
        if state[name] is not None:
            positive(state[name])


def _read_position(folder: Path, rank: int, num_ranks: int) -> dict[str, Any] | None:
    """Return a rank's position, also from a checkpoint of another number of ranks."""
    saved = read_rank_file(folder, rank, num_ranks)
    if saved is None or saved["num_ranks"] == num_ranks:
        return saved
    return _position_on_other_ranks(folder, saved, rank)


def _position_on_other_ranks(folder: Path, saved: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return a rank's position, made from those of another number of ranks.

    - The random states of the epoch's start are those of rank 0, because they determine the order
      of the data.
    - The present random states are those of rank ``rank % written_by``.
    - The sums of the log are means over the ranks, because the Trainer logs the mean over ranks.

    Args:
        folder: Folder of the checkpoint.
        saved: Content of the file of rank 0.
        rank: This rank.
    """
    written_by = saved["num_ranks"]
    of_ranks = [
        _read(path)
        for number in range(written_by)
        if (path := folder / _file_name(number, written_by)).exists()
    ]
    nearest = of_ranks[rank % len(of_ranks)]
    position = saved | {"data": None, "random_states": nearest["random_states"]}
    losses = [each["loss_since_last_log"] for each in of_ranks]
    shares = [each["step_log"]["left_share"] for each in of_ranks]
    position["loss_since_last_log"] = sum(losses) / len(losses)
    position["step_log"] = saved["step_log"] | {"left_share": sum(shares) / len(shares)}
    return position


class _MadeBatch(NamedTuple):
    number: int
    """Number of the batch within its epoch on this rank, from 0; batches count whose rows are left
    out."""

    states: HostStates
    """States of the random generators just before the batch was made."""

    makers: Mapping[str, Any]
    """States of the generators that the data set and the collator hold, at the same time."""

    place: Mapping[str, Any] | None = None
    """State of a loader that keeps its place, at the same time."""


class _Resumed(NamedTuple):
    ahead: _MadeBatch
    """Batch that had been made, but not trained on, when the checkpoint was written."""

    restore_rest: Callable[[], None]
    """Function that restores the states that the generators had when the checkpoint was written."""


@final
class DataPosition:
    """Record the random states before each batch, and restore the states of a checkpoint.

    accelerate's data loaders make one batch ahead, to know which batch is the last. So when a
    checkpoint is written, the next batch has been made but not trained on. A resumed training must
    make this batch again with the same random numbers, and then continue with the random numbers
    that followed.

    Only data loaders without workers draw from the generators of this process. Iterable data sets,
    and accelerate's dispatcher (where rank 0 draws for all ranks), are supported between epochs
    only, unless their loader keeps its place by a state, with or without workers.
    """

    def __init__(self) -> None:
        self._watches = False
        self._stateful: Any = None
        self._first = 0
        self.makers: dict[str, Any] = {}
        """Data set and collator of the watched loader, which may hold generators, by name."""
        self._held: dict[str, Generator] = {}
        self._num_looks = 0
        self._late: Mapping[str, Any] = {}
        self._made: _MadeBatch | None = None
        self._resumed: _Resumed | None = None
        self._kept: HostStates | None = None
        self.is_resumed = False
        """Whether this epoch has reached the batch that was made ahead of the checkpoint."""

    def watch(self, loader: Any) -> None:
        """Record the generators' states before each batch of a loader, until `release`.

        Args:
            loader: Data loader, whose batches are given to `watching`.
        """
        self.release()
        if getattr(loader, "num_workers", 0) == 0:
            self.makers = {name: getattr(loader, name, None) for name in ("dataset", "collate_fn")}
            self._watches = not isinstance(loader, DataLoaderDispatcher)
            self._num_looks = 0
        self._stateful, self._first = stateful_base(loader), 0
        self._watches |= self._stateful is not None

    def keep_states(self) -> None:
        """Make the next epoch begin with the present random states.

        Workers that persist are started in the first epoch, and their seed is drawn then. In a
        resumed training they are started later, and that draw must not count.
        """
        self._kept = HostStates.now()

    def release(self) -> None:
        """Record nothing from now on, and discard all recorded states."""
        self._watches, self.makers, self._held, self._late = False, {}, {}, {}
        self._stateful = None
        self._made = self._resumed = self._kept = None
        self.is_resumed = False

    def watching(self, batches: Iterable[tuple[int, Any]]) -> Iterator[Any]:
        """Yield batches, and record the random states before each of them.

        Args:
            batches: Indices of the rows of each batch, with the number of the batch in its epoch.
        """
        if self._kept is not None:  # the loader has started its workers before the first index
            self._kept.restore()
            self._kept = None
        for number, indices in batches:
            if self._watches:
                self._before_batch(self._first + number)
            yield indices
            # The batch is made, unless it is one to skip: then none was made ahead. The sampler
            # may draw for the next one now.
            if self._watches and self.is_resumed:
                self._restore_rest()

    def resume(
        self,
        saved: Mapping[str, Any] | None,
        restore_rest: Callable[[], None],
        *,
        is_placed: bool = False,
    ) -> None:
        """Make the next epoch restore a checkpoint's random states at the right batch.

        Args:
            saved: State that `state_dict` returned; ``None`` restores nothing.
            restore_rest: Function that restores the states that the generators had when the
                checkpoint was written. It is called once, between two batches: after the batch
                that was made ahead has been made again, and before the next batch is made.
            is_placed: Whether the loader restores its place, and begins with the batch that was
                made ahead. Otherwise it makes the batches before it again.
        """
        if is_placed and saved is not None:
            self._first = saved["batch"]
            self._stateful.load_state_dict(saved["place"])
        if saved is not None and self._watches:
            states = HostStates.decoded(saved["random_states"])
            ahead = _MadeBatch(saved["batch"], states, saved.get("makers", {}))
            self._resumed = _Resumed(ahead, restore_rest)

    def restore_makers(self, states: Mapping[str, Any]) -> None:
        """Restore the generators that the data set and the collator hold.

        A generator that they make for the first batch gets its state after this batch.

        Args:
            states: States of `mfwrap.checkpoints.held_generators.states_of`.
        """
        self._late = restore_generators(self.makers, states)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the number and the random states of the last batch made, as JSON values.

        Returns ``None`` if no batch was made, or the loader is not watched.
        """
        if self._made is None:
            return None
        return {
            "batch": self._made.number,
            "random_states": self._made.states.encoded(),
            "makers": self._made.makers,
            "place": self._made.place,
        }

    def _before_batch(self, number: int) -> None:
        """Record the generators' states before a batch; in a resumed epoch, restore states first.

        The batch that was made ahead of the checkpoint gets the same states as the first time.
        """
        if self._resumed is not None and number >= self._resumed.ahead.number:
            # The batch itself may lack since then, because its rows are left out.
            self._resumed.ahead.states.restore()
            restore_generators(self.makers, self._resumed.ahead.makers)
            self._num_looks = 0
            self.is_resumed = True
        elif self._late and self._num_looks == 1:
            restore_generators(self.makers, self._late)
            self._late = {}
        # The data set may go on to change what its state holds.
        place = None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())
        self._made = _MadeBatch(number, HostStates.now(), self._maker_states(), place)

    def _maker_states(self) -> dict[str, Any]:
        # A collator may make its generator for the first batch, so look again before the second.
        if self._num_looks < 2:
            self._held = held_generators(self.makers)
            self._num_looks += 1
        return states_of(self._held)

    def _restore_rest(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.restore_rest()
