"""Do all ranks still have the same weights?"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from mfwrap import DeferredReads
from mfwrap.callbacks.anomaly_log import Anomaly, AnomalyLog, layer_of
from mfwrap.callbacks.arguments import check_bool, check_int
from mfwrap.callbacks.loss_monitor_settings import directory_name
from mfwrap.callbacks.rank_evidence import this_rank
from mfwrap.callbacks.replica_hash import bitwise_hashes
from mfwrap.callbacks.run_size import num_processes
from mfwrap.callbacks.tensor_norms import trainable

__all__ = ["ReplicaCheck"]


class _Hashes(NamedTuple):
    """What all ranks have at a step."""

    step: int
    where: str
    """``"weight"`` or ``"gradient"``."""

    names: tuple[str, ...]
    of_ranks: Tensor
    """Shape ``(ranks, len(names))``, int64."""


@final
class ReplicaCheck(TrainerCallback):
    """Compare weights, bit by bit, over the ranks of a data-parallel training.

    Every `step_interval` steps each rank hashes its trainable weights, which reads them once, and
    the ranks exchange 8 bytes a weight. The comparison happens on the device and is heard of a step
    later, without a wait. Weights that differ are written to ``anomalies.jsonl`` in the run folder
    (kind ``"replicas_differ"``) and to the log, with the ranks that differ from most; of two ranks
    both are named. One process, and weights that are sharded, have nothing to compare.

    All ranks have to have the callback.

    Source: MindFormers, ``StressTestModelMonitor``, which compares losses and norms.

    Args:
        step_interval: Steps from one comparison to the next.
        gradients: Compare the reduced gradients, too; a loop of your own sends
            ``on_pre_optimizer_step`` for it.
        stop: Raise ``RuntimeError`` on all ranks when replicas differ.
        folder: Of the run; ``None`` for ``args.output_dir``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `step_interval` is < 1.
    """

    def __init__(
        self,
        step_interval: int = 100,
        *,
        gradients: bool = False,
        stop: bool = False,
        folder: str | Path | None = None,
    ) -> None:
        check_int("step_interval", step_interval, minimum=1)
        check_bool("gradients", gradients)
        check_bool("stop", stop)
        self._step_interval = step_interval
        self._gradients = gradients
        self._stops = stop
        self._folder = directory_name("folder", folder)
        self._log: AnomalyLog | None = None
        self._reads: DeferredReads | None = None

    def on_train_begin(self, args: TrainingArguments | None, *_: Any, **__: Any) -> None:
        """Find the run folder; forget what is pending of another run."""
        output_dir = None if args is None else args.output_dir
        folder = self._folder or output_dir
        rank = this_rank()
        self._log = AnomalyLog(None if folder is None else Path(folder)) if rank == 0 else None
        self._reads = None

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        model: nn.Module | None = None,
        **__: Any,
    ) -> None:
        """Hear of the last comparison; compare gradients, if it is their turn."""
        del args
        self._flush()
        step = state.global_step + 1
        if self._gradients and model is not None and step % self._step_interval == 0:
            gradients = {
                name: weight.grad
                for name, weight in trainable(model).items()
                if weight.grad is not None
            }
            self._compare(step, "gradient", gradients)

    def on_step_end(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        model: nn.Module | None = None,
        **__: Any,
    ) -> None:
        """Hear of the last comparison; compare weights, if it is their turn."""
        del args
        self._flush()
        if model is not None and state.global_step % self._step_interval == 0:
            self._compare(state.global_step, "weight", dict(trainable(model)))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Hear of the last comparison."""
        self._flush()

    def _compare(self, step: int, where: str, tensors: dict[str, Any]) -> None:
        whole = {n: t for n, t in tensors.items() if not hasattr(t, "full_tensor")}
        if num_processes() == 1 or not whole:
            return
        hashes = bitwise_hashes(list(whole.values()))
        of_ranks = [torch.empty_like(hashes) for _ in range(num_processes())]
        torch.distributed.all_gather(of_ranks, hashes)
        found = _Hashes(step, where, tuple(whole), torch.stack(of_ranks))
        differ = (found.of_ranks != found.of_ranks[0]).any().float().reshape(1)
        if self._reads is None:
            self._reads = DeferredReads(differ.device)
        self._reads.submit(differ, functools.partial(self._receive, found))

    def _flush(self) -> None:
        if self._reads is not None:
            self._reads.flush()

    def _receive(self, found: _Hashes, differ: Sequence[float]) -> None:
        if not differ[0]:
            return
        ranks, names = _outliers(found)
        anomaly = Anomaly(
            step=found.step,
            kind="replicas_differ",
            ranks=ranks,
            layer=layer_of(names[0]),
            where=found.where,
            name=names[0],
            num_groups=len(names),
        )
        if self._log is not None:
            self._log.write(anomaly)
        if self._stops:
            msg = f"replicas must be bitwise the same, got {anomaly}"
            raise RuntimeError(msg)


def _outliers(found: _Hashes) -> tuple[tuple[int, ...], list[str]]:
    """Return the ranks that differ from most, and the names of what differs. Waits."""
    columns = list(zip(*found.of_ranks.tolist(), strict=True))
    ranks: set[int] = set()
    names = []
    for name, column in zip(found.names, columns, strict=True):
        if len(set(column)) == 1:
            continue
        names.append(name)
        usual = max(column, key=column.count)
        # Without a majority nobody knows who is right.
        has_majority = 2 * column.count(usual) > len(column)
        ranks |= {r for r, one in enumerate(column) if one != usual or not has_majority}
    return tuple(sorted(ranks)), names
