"""Keep the global batch and the order of the data of a Trainer that resumes on other ranks."""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import IterableDataset, RandomSampler
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from mfwrap.accelerate.attributes import replaced
from mfwrap.arguments import callers_stacklevel
from mfwrap.checkpoints.global_batch import GlobalBatch, resumed_accumulation
from mfwrap.collectives import gather_objects, raising_together
from mfwrap.compatibility.transformers import batch_size_of
from mfwrap.config import StepConfig
from mfwrap.trainer.data.position import read_rank_file
from mfwrap.trainer.data.skip import DataStart
from mfwrap.trainer.view import TrainerView


@final
class TrainerBatch:
    """Keep the global batch of an `MFTrainer` that resumes on another number of ranks.

    accelerate deals the micro-batches of one global order to the ranks in turn. So with the same
    global batch, the rows of each update are the same on any number of ranks.

    Args:
        trainer: The trainer.
        config: Settings of its step.
    """

    def __init__(self, trainer: TrainerView, config: StepConfig) -> None:
        self._trainer = trainer
        self._config = config
        self._configured_steps = 0
        self._updates_per_epoch = 0
        self._has_length = True
        self._saved: dict[str, Any] | None = None
        self._checkpoint = Path()
        self._group_size: int | None = None
        self.num_skipped = 0
        """Number of batches of the epoch that accelerate must skip in addition to its own."""

    @contextlib.contextmanager
    def resuming(self, checkpoint: Path | None) -> Iterator[None]:
        """Within the block, accumulate so many micro-batches that the global batch stays the same.

        Call it on every rank.

        Args:
            checkpoint: Checkpoint to resume from; ``None`` for a training from the start.

        Raises:
            ValueError: On all ranks, if the number of ranks does not divide the global batch, or if
                the resumed number of micro-batches has no local norms, which were asked for.
        """
        args = self._trainer.args
        self._configured_steps = steps = args.gradient_accumulation_steps
        self._saved = self._group_size = None
        if checkpoint is not None:
            self._checkpoint = checkpoint
            with raising_together():
                found = read_rank_file(checkpoint, args.process_index, args.world_size)
            # A node with a disk of its own may not have a file with the global batch.
            records = gather_objects(None if found is None else found["global_batch"])
            self._saved = next((each for each in records if each is not None), None)
        if self._saved is not None:
            with raising_together():
                saved = GlobalBatch.restored(self._saved["sizes"])
                steps = resumed_accumulation(saved, self.now(saved), self._checkpoint)
                # The number is another one than at the construction of the trainer.
                check_micro_batches(self._config, args, steps)
            self._group_size = self._saved["group_size"]
        elif checkpoint is not None:
            self._warn_of_unknown_batch(checkpoint)
        with replaced(args, gradient_accumulation_steps=steps):
            yield

    def _warn_of_unknown_batch(self, checkpoint: Path) -> None:
        """Warn if another number of ranks wrote a checkpoint that has no global batch."""
        args = self._trainer.args
        # The Trainer writes `rng_state.pth`, or with several ranks a file for each.
        written_by = len(list(checkpoint.glob("rng_state_*.pth")))
        if written_by == 0 and (checkpoint / "rng_state.pth").exists():
            written_by = 1
        if written_by not in {0, args.world_size} and args.process_index == 0:
            warnings.warn(
                f"{checkpoint} was written by {written_by} rank(s), is resumed by "
                f"{args.world_size} and does not record the global batch: set "
                "`gradient_accumulation_steps` so that updates train on as many rows as before, "
                "or rows of the present epoch are repeated or left out",
                stacklevel=callers_stacklevel(),
            )

    def now(self, saved: GlobalBatch | None = None) -> GlobalBatch:
        """Return the present global batch.

        Args:
            saved: Global batch of a checkpoint, from which the Trainer restores the batch size.
        """
        trainer, args = self._trainer, self._trainer.args
        steps = args.gradient_accumulation_steps
        batch_size = batch_size_of(trainer)
        num_ranks = trainer.get_total_train_batch_size(args) // (steps * batch_size)
        if args.auto_find_batch_size and saved is not None:
            batch_size = saved.batch_size  # the Trainer restores it
        if trainer.accelerator.split_batches:
            num_ranks = 1
        # A `train` of the user's own may not call `resuming`.
        return GlobalBatch(num_ranks, batch_size, steps, self._configured_steps or steps)

    @property
    def _is_on_other_ranks(self) -> bool:
        saved = self._saved
        return saved is not None and saved["num_ranks"] != self._trainer.args.world_size

    @property
    def _has_other_batch_size(self) -> bool:
        if self._saved is None:
            return False
        saved = GlobalBatch.restored(self._saved["sizes"])
        return saved.batch_size != self.now(saved).batch_size

    def check_epoch(self, updates_per_epoch: int, *, has_length: bool) -> None:
        """Check that an epoch has as many updates as before the checkpoint.

        Args:
            updates_per_epoch: Number of updates of an epoch.
            has_length: Whether the data loader has a length. Without one, `updates_per_epoch` is
                ``max_steps`` and is not checked.

        Raises:
            ValueError: If the number differs although the global batch is the same, and its
                division into ranks and micro-batches is another one: the position in the data would
                then be another one, too.
        """
        self._updates_per_epoch, self._has_length = updates_per_epoch, has_length
        saved = self._saved
        if saved is None or not has_length or self._trainer.args.ignore_data_skip:
            return
        was, now = GlobalBatch.restored(saved["sizes"]), self.now()
        is_divided_alike = was[:3] == now[:3] and not self._is_on_other_ranks
        if is_divided_alike or now.size != was.size:
            return  # `resumed_accumulation` has warned of another size
        if saved["updates_per_epoch"] not in {None, updates_per_epoch}:
            msg = (
                f"cannot resume from {self._checkpoint}, which was written with "
                f"{was.num_ranks} x {was.batch_size} x {was.accumulation_steps} (ranks x batch size"
                f" x accumulation), with {now.num_ranks} x {now.batch_size} x "
                f"{now.accumulation_steps}: an epoch has {updates_per_epoch} updates and had "
                f"{saved['updates_per_epoch']}, because the data have changed or "
                "`dataloader_drop_last` leaves out other rows; set `ignore_data_skip` to begin a "
                "new epoch instead"
            )
            raise ValueError(msg)

    def begin_epoch(self, loader: Any, start: DataStart | None) -> None:
        """Keep the order of the data that the first ranks had.

        Warns if the order depends on the number of ranks or the batch size, which has changed.

        Args:
            loader: Data loader of the epoch.
            start: Place in the data of the first batch; ``None`` for the start of an epoch.
        """
        samplers = _samplers_of(loader)
        if samplers and isinstance(samplers[-1], LengthGroupedSampler):
            # Rows are sorted by length in groups of 50 times this size. By default it depends on
            # the accumulation steps.
            sampler = samplers[-1]
            self._group_size = sampler.batch_size = self._group_size or sampler.batch_size
        self.num_skipped = 0
        if start is None:
            return
        args = self._trainer.args
        for each in samplers:
            # The Trainer is about to wrap the samplers of a loader whose first batches it skips.
            # accelerate then does not pass the number of the epoch on to all of them.
            if hasattr(each, "set_epoch"):
                each.set_epoch(start.epoch)
        if isinstance(loader, DataLoaderDispatcher) and samplers and not args.ignore_data_skip:
            # A dispatcher reads a batch for each rank at a time, but `skip_first_batches` skips the
            # batches of one rank only.
            others = 0 if loader.split_batches else loader.state.num_processes - 1
            self.num_skipped = others * start.batches
        has_other = {"ranks": self._is_on_other_ranks, "batch size": self._has_other_batch_size}
        reason = _dependence(
            loader,
            samplers,
            has_other_ranks=has_other["ranks"],
            has_other_batch_size=has_other["batch size"],
        )
        if reason is not None and args.should_save:
            others = " and ".join(name for name, is_other in has_other.items() if is_other)
            warnings.warn(
                f"{reason}, so the rows of updates after {self._checkpoint} differ from those of a "
                f"run with the same {others} as before: rows may be repeated or left out",
                stacklevel=callers_stacklevel(),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume on another number of ranks needs, as JSON values."""
        return {
            "sizes": self.now().state_dict(),
            "num_ranks": self._trainer.args.world_size,
            "updates_per_epoch": (self._updates_per_epoch if self._has_length else 0) or None,
            "group_size": self._group_size,
        }


def _samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a prepared data loader, outermost first; the last one yields rows."""
    found = []
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None:
        found.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    return found


def _dependence(
    loader: Any,
    samplers: Sequence[Any],
    *,
    has_other_ranks: bool,
    has_other_batch_size: bool,
) -> str | None:
    """Return why another number of ranks or batch size changes the order of a loader's rows.

    ``None`` if it does not change.
    """
    data = getattr(loader, "dataset", None)
    # A dispatcher reads the batches of all ranks on rank 0.
    is_read_by_each = has_other_ranks and not isinstance(loader, DataLoaderDispatcher)
    datasets: Any = sys.modules.get("datasets")  # not imported: then no data come from it
    if is_read_by_each and datasets is not None and isinstance(data, datasets.IterableDataset):
        return "each rank reads other shards of the iterable data set"
    # The workers yield whole batches in turn.
    has_workers = isinstance(data, IterableDataset) and getattr(loader, "num_workers", 0) > 1
    if has_workers and (is_read_by_each or has_other_batch_size):
        return "each of several data loader workers reads an iterable data set by itself"
    if has_other_ranks and samplers and type(samplers[-1]) is RandomSampler:
        return "`accelerator_config.use_seedable_sampler` is false"
    return None


def check_micro_batches(config: StepConfig, args: TrainingArguments, number: int) -> None:
    """Check that an update of `number` micro-batches has the local norms that are asked for.

    Args:
        config: Settings of the step.
        args: Training arguments; accelerate's ``sync_each_batch`` is one of them.
        number: Number of micro-batches of an update on one rank.

    Raises:
        ValueError: If local norms are asked for, and gradients of each of several micro-batches are
            reduced.
    """
    accelerator_config: Any = args.accelerator_config
    of_accelerate = accelerator_config.gradient_accumulation_kwargs or {}
    reduces_each = config.sync_each_batch or bool(of_accelerate.get("sync_each_batch"))
    checked = dataclasses.replace(config, sync_each_batch=reduces_each)
    checked.check_micro_batches(max(number, of_accelerate.get("num_steps", 1)))
