"""Report the loss of an `MFTrainer` by source of the data, and record the loss of every row.

The rows of a micro-batch are those that the batch sampler has dealt (`NotedRows`), so the source of
a row never passes through a collator. Their losses come from the forward pass that is trained
(`mfwrap.step.row_losses`), by a hook that the model has during the micro-batch only.
"""

import contextlib
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from mfwrap.arguments import check_bool, described
from mfwrap.collectives import add_over_ranks
from mfwrap.records.row_losses import BY_SOURCE, RowLossFiles, check_pyarrow
from mfwrap.step.losses import named_losses
from mfwrap.step.per_token import shifts_labels
from mfwrap.step.row_losses import RowLosses, row_losses
from mfwrap.tensors.module_hooks import keep_out_of_copies
from mfwrap.tensors.training_forwards import is_training_forward
from mfwrap.tensors.wrappers import unwrapped_network
from mfwrap.trainer.data.places import DealtRows, NotedRows
from mfwrap.trainer.view import TrainerView, run_folder_of

LossBy = str | Sequence[str]
"""Column of the training data that names the source of each row; or the names themselves, one for
each row or for each part of a ``torch.utils.data.ConcatDataset``."""

_MAX_SOURCES = 256
"""Largest number of sources: a column with more is hardly one of sources."""

_MAX_ROWS = 100_000
"""Number of rows in a file, unless a checkpoint ends it earlier; also of those on the device."""

_TOLERANCE = 0.01
"""Largest relative difference between the trained loss and that of the rows, in any precision."""


class _Seen(NamedTuple):
    """Rows of a micro-batch with their losses, still on the device."""

    step: int
    rows: DealtRows
    losses: RowLosses


class _Comparison(NamedTuple):
    """Comparison of the losses of rows with the loss that is trained, summed over micro-batches."""

    num_lost: float
    """Number of targets that belong to no row."""

    num_misplaced: float
    """Number of targets that are not the label at their place."""

    difference: float
    """Sum of the absolute differences between the trained loss and that of the rows."""

    trained: float
    """Sum of the absolute values of the trained loss."""

    num_compared: float
    """Number of micro-batches in the two sums: those with targets and a finite loss."""

    def check(self) -> None:
        """Raise ValueError if the losses are not those of rows, or not those that were trained."""
        if self.num_lost:
            msg = (
                "`loss_by` and `row_losses` need `position_ids` that are 0 at the first token of "
                f"each row of the data set, and only there; got {self.num_lost:.0f} targets after "
                "the last row, as in a data set of packed rows"
            )
            raise ValueError(msg)
        if self.num_misplaced:
            msg = (
                "`loss_by` and `row_losses` need a model whose loss is that of its `labels` in "
                f"their order, got {self.num_misplaced:.0f} targets that differ from the label at "
                "their place, as in a model that selects tokens before its loss"
            )
            raise ValueError(msg)
        if self.difference > _TOLERANCE * self.trained + 1e-6 * self.num_compared:
            msg = (
                "`loss_by` and `row_losses` need a model whose loss is the mean of the losses of "
                f"its targets, got {self.trained / self.num_compared:.6g} in the mean over "
                f"micro-batches, which differs by {self.difference / self.num_compared:.6g} from "
                "the losses of the targets; leave them out with a weighted or smoothed loss"
            )
            raise ValueError(msg)


@final
class LossByRow:
    """Follow the losses of the rows that an `MFTrainer` trains on.

    Costs one number per target in memory, and some small kernels per micro-batch. The values are
    read on the host where the Trainer logs, which synchronizes anyway. On several ranks, one
    all-reduce of two numbers per source, and a few more, comes before that. In each micro-batch,
    the losses of the rows are compared with the loss that is trained, on the device. Only the first
    comparison of a training is read at once. Without a log or a checkpoint, 100,000 rows are read
    at once to be written.

    A cross entropy may leave tokens out; any other loss must be that of all labels. A row that the
    data set has packed counts as one. A training that resumes within a logging interval continues
    the sums; on another number of ranks it begins them again.

    Args:
        trainer: The trainer.
        noted: Rows that have been dealt.
        loss_by: See `MFTrainerMixin`.
        records_rows: Whether the loss of each row is written to files.

    Raises:
        ImportError: If rows are to be recorded and pyarrow is not installed.
        TypeError: If an argument has the wrong type.
    """

    def __init__(
        self, trainer: TrainerView, noted: NotedRows, loss_by: LossBy | None, *, records_rows: bool
    ) -> None:
        check_bool("row_losses", records_rows)
        if not _are_names(loss_by):
            msg = (
                "`loss_by` must be the name of a column, a sequence of names or None, got "
                f"{described(loss_by):.200}"
                + ("; give loss_by.tolist()" if hasattr(loss_by, "tolist") else "")
            )
            raise TypeError(msg)
        if records_rows:
            check_pyarrow("`row_losses`")
        self._trainer = trainer
        self._noted = noted
        self._loss_by = loss_by
        self._records_rows = records_rows
        self.is_on = loss_by is not None or records_rows
        """Whether losses of rows are needed."""
        if self.is_on:
            noted.needed_by = "`row_losses`" if loss_by is None else "`loss_by`"
        self._names: list[str] = []
        # Number of the source of each row of the data set.
        self._source_of = np.zeros(0, np.int64)
        # Since the last log: sums of the losses and numbers of targets, by source; and the
        # comparison, see `_Comparison`.
        self._totals = torch.zeros(2, 0)
        self._compared = torch.zeros(5)
        self._step = 0
        self._left: list[DealtRows] = []
        self._rows: DealtRows | None = None
        self._found: RowLosses | None = None
        self._has_other_losses = False
        self._is_checked = False
        self._seen: list[_Seen] = []
        self._num_seen = 0
        self._files: RowLossFiles | None = None
        self._columns: dict[str, list[Any]] = {}

    def check_trainer(self) -> None:
        """Check the training arguments; call it at the end of the trainer's construction.

        Raises:
            ValueError: If the trained loss is not the mean of the losses of rows.
        """
        trainer = self._trainer
        if not self.is_on:
            return
        for name, got, needed in (
            ("label_smoothing_factor", trainer.args.label_smoothing_factor, 0),
            ("compute_loss_func", trainer.compute_loss_func, None),
        ):
            if got != needed:
                msg = (
                    f"`{name}` must be {needed} with `loss_by` or `row_losses`, which take the "
                    f"losses of rows from the model's own loss, got {got}"
                )
                raise ValueError(msg)
        if trainer.args.n_gpu > 1:
            msg = (
                "`loss_by` and `row_losses` need one process per GPU, got "
                f"{trainer.args.n_gpu} GPUs in one process; start the training with torchrun"
            )
            raise ValueError(msg)

    def prepare(self) -> None:
        """Read the names of the sources; call it before the ranks are compared.

        Raises:
            ValueError: If the data have no such column, not as many rows as there are names, a row
                without a name, or two names that are the same as text.
        """
        if self._loss_by is None:
            return
        data = self._trainer.train_dataset
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            msg = f"`loss_by` needs a map-style data set with a length, got {type(data).__name__}"
            raise ValueError(msg)
        names = _names_of_rows(data, self._loss_by)
        sources: dict[str, tuple[int, Any]] = {}
        self._source_of = np.fromiter(_numbers(names, sources), np.int64, len(names))
        self._names = list(sources)
        if len(self._names) > _MAX_SOURCES:
            msg = (
                f"`loss_by` must name at most {_MAX_SOURCES} sources, got {len(self._names)} in "
                f"{len(names)} rows, such as {self._names[0]!r:.60} and {self._names[1]!r:.60}"
            )
            raise ValueError(msg)

    def source_of(self, index: int) -> str:
        """Return the source of a row of the data set; call `prepare` before."""
        return self._names[int(self._source_of[index])]

    @property
    def fact(self) -> str:
        """Description of the sources, to be compared across ranks."""
        checksum = zlib.crc32(self._source_of.tobytes())
        return f"{self._names}, rows with checksum {checksum:08x}" if self._names else "none"

    def begin(self, saved: Mapping[str, Any] | None) -> None:
        """Begin a training; call it when the records of the run are restored.

        Args:
            saved: Content of the position file of the resumed checkpoint; ``None`` for a training
                from the start.
        """
        trainer = self._trainer
        if not self.is_on:
            return
        device = trainer.accelerator.device
        self._totals = torch.zeros(2, len(self._names), dtype=torch.float64, device=device)
        self._compared = torch.zeros(5, dtype=torch.float64, device=device)
        state = None if saved is None else saved.get("loss_by")
        # The sums of one rank are no sums of another number of ranks, so begin anew there.
        if (
            state is not None
            and saved is not None
            and saved["num_ranks"] == trainer.args.world_size
        ):
            by_name = dict(zip(state["sources"], zip(*state["totals"], strict=True), strict=True))
            self._totals += torch.tensor(
                [by_name.get(name, (0.0, 0.0)) for name in self._names], dtype=torch.float64
            ).T.to(device)
        self._left, self._seen, self._num_seen, self._step = [], [], 0, 0
        self._is_checked = False
        if self._records_rows:
            self._files = RowLossFiles(run_folder_of(trainer))
            is_first = trainer.args.local_process_index == 0
            self._files.begin(trainer.state.global_step, sets_aside=is_first)
            self._columns = {}

    @contextlib.contextmanager
    def of_training(self) -> Iterator[None]:
        """Write the last rows after the block, also after an error."""
        try:
            yield
        finally:
            failed = sys.exception() is not None
            # A second error would hide the first one.
            with contextlib.suppress(*([OSError, RuntimeError] if failed else [])):
                self.write()
            self._files = None

    @contextlib.contextmanager
    def watching(self, model: nn.Module, *, stands_in: bool) -> Iterator[Callable[..., None]]:
        """Take the losses of a micro-batch, whose forward pass is within the block.

        Args:
            model: The model that is called, with or without wrappers.
            stands_in: Whether the micro-batch has no weight in the update.

        Yields:
            Function to call with the micro-batch's loss and the number of targets of its update.
        """
        step = self._trainer.state.global_step + 1
        if step != self._step:
            self._step, self._left = step, list(self._noted.of_step(step))
        self._rows = self._left.pop(0) if self._left else None
        self._found = None

        def take(network: nn.Module, _: Any, inputs: dict[str, Any], output: Any) -> None:
            if is_training_forward(network):
                self._take(network, inputs, output)

        hook = None if stands_in else model.register_forward_hook(take, with_kwargs=True)
        if hook is not None:
            keep_out_of_copies(model, hook)
        try:
            yield self._end if hook else lambda *_: None
        finally:
            if hook is not None:
                hook.remove()

    def _take(self, network: nn.Module, inputs: dict[str, Any], output: Any) -> None:
        if self._rows is None or self._found is not None:
            got = "unknown rows" if self._rows is None else "a second call"
            msg = (
                "`loss_by` and `row_losses` need one call of the model for each micro-batch that "
                f"the data loader gives, got {got} in step {self._step}"
            )
            raise ValueError(msg)
        num_rows, shifts = len(self._rows.indices), shifts_labels(unwrapped_network(network))
        self._found = row_losses(output, inputs, num_rows, shifts_labels=shifts)
        self._has_other_losses = bool(named_losses(output))

    def _end(self, loss: Tensor, num_items: Any) -> None:
        """Add the losses of the micro-batch that has been trained."""
        rows, found = self._rows, self._found
        if rows is None or found is None:
            msg = (
                "`loss_by` and `row_losses` need a model that is called with `labels` in training, "
                f"got no call in step {self._step}"
            )
            raise ValueError(msg)
        self._compare(found, loss, num_items)
        if not self._is_checked:
            first = _Comparison(*self._compared.tolist())
            first.check()
            self._is_checked = first.num_compared > 0 or self._has_other_losses
        if self._records_rows:
            self._seen.append(_Seen(self._step, rows, found))
            self._num_seen += len(rows.indices)
            if self._num_seen >= _MAX_ROWS:  # without a log or a checkpoint
                self._read_rows()
        if not self._names:
            return
        sums, targets = found.sums, found.targets
        if self._trainer.args.logging_nan_inf_filter:
            # As in the mean loss that is logged, a micro-batch with a non-finite loss is left out.
            is_finite = sums.sum().isfinite()
            sums, targets = torch.where(is_finite, sums, 0.0), targets * is_finite
        sources = torch.from_numpy(self._source_of[np.asarray(rows.indices)])
        device = self._totals.device
        if device.type == "cuda":
            sources = sources.pin_memory()
        both = torch.stack([sums, targets]).to(device).double()
        self._totals.index_add_(1, sources.to(device, non_blocking=True), both)

    def _compare(self, found: RowLosses, loss: Tensor, num_items: Any) -> None:
        """Compare the losses of rows with the loss that is trained, on the device.

        A model that takes the number of targets of the update divides the sum of its losses by it.
        The Trainer multiplies by the number of ranks, whose gradients are averaged. Any other mean
        loss it divides by the number of micro-batches.
        """
        device, trainer = self._compared.device, self._trainer
        for at, number in enumerate((found.num_lost, found.num_misplaced)):
            if number is not None:
                self._compared[at] += number.to(device)
        if self._has_other_losses:  # such as that of a router, which has no rows
            return
        trained, total, count = (
            value.to(device).double() for value in (loss, found.sums.sum(), found.targets.sum())
        )
        items = count if num_items is None else torch.as_tensor(num_items).reshape(-1)[0]
        mean = total / count
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = trainer.model_accepts_loss_kwargs and num_items is not None
        expected = [mean / trainer.current_gradient_accumulation_steps]
        if is_scaled:  # a squared error is a mean nevertheless
            expected = [total / items, total / items * trainer.args.world_size, mean]
        difference = (torch.stack(expected) - trained).abs().amin()
        # A micro-batch without targets, or with a non-finite loss, says nothing: its mean is none.
        compared = torch.stack([difference, trained.abs(), torch.ones_like(trained)])
        self._compared[2:] += torch.where(difference.isfinite(), compared, 0.0)

    def values_to_log(self) -> dict[str, float]:
        """Return loss and number of targets of each source since the last log, on all ranks.

        Synchronizes with the device; all ranks must call it.

        Returns:
            ``loss/<source>``, but for sources without targets, and ``tokens/<source>``.

        Raises:
            ValueError: If the losses are not those of rows, or not those that were trained.
        """
        if not self.is_on:
            return {}
        self._read_rows()
        message = torch.cat([self._compared, self._totals.flatten()])
        add_over_ranks(message)
        read = message.tolist()
        self._totals.zero_()
        self._compared.zero_()
        _Comparison(*read[:5]).check()
        totals, number = read[5:], len(self._names)
        found = list(zip(self._names, totals[:number], totals[number:], strict=True))
        loss, tokens = BY_SOURCE
        losses = {f"{loss}{name}": total / count for name, total, count in found if count}
        return losses | {f"{tokens}{name}": int(count) for name, _, count in found}

    def _read_rows(self) -> None:
        """Copy the losses of the rows to the host; synchronizes with the device."""
        seen, self._seen, self._num_seen = self._seen, [], 0
        if not seen:
            return
        lengths = [len(each.rows.indices) for each in seen]
        indices = np.concatenate([np.asarray(each.rows.indices) for each in seen])
        targets = torch.cat([each.losses.targets for each in seen]).cpu().numpy()
        sums = torch.cat([each.losses.sums for each in seen]).cpu().numpy()
        columns: dict[str, Any] = {
            "step": np.repeat([each.step for each in seen], lengths),
            "epoch": np.repeat([each.rows.epoch for each in seen], lengths),
            "position": np.concatenate([np.asarray(each.rows.positions) for each in seen]),
            "index": indices,
            "loss": sums / np.maximum(targets, 1),
            "targets": targets,
        }
        if self._names:
            columns["source"] = np.asarray(self._names)[self._source_of[indices]]
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)
        if sum(map(len, self._columns["step"])) >= _MAX_ROWS:
            self.write()

    def write(self) -> None:
        """Write the rows since the last call to a file; call it before a checkpoint is saved.

        Synchronizes with the device.

        Raises:
            OSError: If the file cannot be written.
        """
        self._read_rows()
        columns, self._columns = self._columns, {}
        if self._files is not None and columns:
            self._files.write({name: np.concatenate(parts) for name, parts in columns.items()})

    def state_dict(self) -> dict[str, Any] | None:
        """Return the sums since the last log, as JSON values. Synchronizes with the device."""
        if not self._names:
            return None
        return {"sources": self._names, "totals": self._totals.tolist()}


def check_state(state: Any) -> None:
    """Check a state of `LossByRow` that was read from a file; ``None`` is none.

    Raises:
        LookupError: If an entry is missing.
        TypeError: If a value has the wrong type.
        ValueError: If there are not as many sums as sources.
    """
    if state is None:
        return
    names, totals = state["sources"], state["totals"]
    sizes = [len(names), *map(len, totals)]
    is_right = all(isinstance(name, str) for name in names) and all(
        type(number) in {int, float} for numbers in totals for number in numbers
    )
    if len(sizes) != 3 or len(set(sizes)) != 1 or not is_right:
        msg = f"expected sums of the losses of sources, got {state!r:.80}"
        raise ValueError(msg)


def _are_names(value: object) -> bool:
    if value is None or isinstance(value, str):
        return True
    return isinstance(value, Sequence) and not isinstance(value, bytes)


def _names_of_rows(data: Any, loss_by: LossBy) -> Sequence[Any]:
    """Return the name of the source of each row."""
    if isinstance(loss_by, str):
        return _column(data, loss_by)
    if isinstance(data, ConcatDataset) and len(loss_by) == len(data.datasets):
        sizes = np.diff(data.cumulative_sizes, prepend=0).tolist()
        return [name for name, size in zip(loss_by, sizes, strict=True) for _ in range(size)]
    if len(loss_by) != len(data):
        msg = (
            "`loss_by` must have a name for each row of the training data, or for each part of a "
            f"torch.utils.data.ConcatDataset, got {len(loss_by)} names for {len(data)} rows"
        )
        raise ValueError(msg)
    return loss_by


def _numbers(names: Sequence[Any], sources: dict[str, tuple[int, Any]]) -> Iterator[int]:
    """Yield the number of the source of each row; add each new source to `sources` by its text."""
    for index, name in enumerate(names):
        number, first = sources.setdefault(str(name), (len(sources), name))
        if name is None or name != first:
            msg = (
                "`loss_by` must name the source of each row, with names that differ as text, got "
                f"{name!r:.60} in row {index}" + ("" if name is None else f" and {first!r:.60}")
            )
            raise ValueError(msg)
        yield number


def _column(data: Any, column: str) -> Sequence[Any]:
    """Return a column of training data, without a call of code that makes rows.

    Raises:
        ValueError: If there is no such column.
    """
    if isinstance(data, ConcatDataset):
        return [name for part in data.datasets for name in _column(part, column)]
    if isinstance(data, Subset):
        names = _column(data.dataset, column)
        return [names[index] for index in data.indices]
    columns = getattr(data, "column_names", None)
    if columns is not None and column in columns:
        return list(data[column])
    if isinstance(data, (list, tuple)) and all(
        isinstance(row, Mapping) and column in row for row in data
    ):
        return [row[column] for row in data]
    msg = (
        f"`loss_by` must be a column of the training data, got {column!r} and "
        f"{type(data).__name__} with the columns {columns or 'unknown'}; or give a name for each "
        "row"
    )
    raise ValueError(msg)
