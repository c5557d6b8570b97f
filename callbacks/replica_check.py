"""Compare the weights of all ranks of a data-parallel training, bit by bit."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap import DeferredReads
from mfwrap.arguments import check_bool, check_int, directory_name
from mfwrap.callbacks.culprit.anomaly_log import UNKNOWN_CAUSE, Anomaly, AnomalyLog
from mfwrap.callbacks.shared.run_folder import run_folder
from mfwrap.callbacks.shared.training_weights import monitors_training
from mfwrap.collectives import gather_on_all, num_ranks, this_rank
from mfwrap.tensors.fingerprints import bitwise_hashes
from mfwrap.tensors.norm_groups import layer_of
from mfwrap.tensors.shards import is_distributed
from mfwrap.tensors.wrappers import trainable
from mfwrap.trainer import MonitorCallback


class _Hashes(NamedTuple):
    """Hashes of the tensors of all ranks at a step."""

    step: int
    where: str
    """``"weight"`` or ``"gradient"``."""

    names: tuple[str, ...]
    of_ranks: Tensor
    """Shape ``(ranks, len(names))``, int64."""

    before: Tensor | None = None
    """Hashes right after the last update, same shape; ``None`` if not taken."""


@final
@monitors_training
class ReplicaCheck(MonitorCallback):
    """Check that all ranks of a data-parallel training have bitwise identical weights.

    Every `step_interval` steps each rank hashes its trainable weights after the update and again
    before the next update. That reads the weights twice, and sends 8 bytes per weight tensor twice.
    The hashes are compared on the device and read one step later, without host-device
    synchronization in the step. A new difference is written to ``anomalies.jsonl`` in the run
    folder (kind ``"replicas_differ"``) and to the log.

    If a rank's weights have changed between two updates, the record names that rank. Otherwise the
    record names the ranks that differ from the majority. Without a majority, as with two ranks, the
    record names all ranks. If no weights have changed between updates and `step_interval` is 1, the
    update itself had different results on the ranks.

    All ranks must have the callback. Nothing is compared with one process. Sharded weights are
    left out.

    Source: MindFormers, ``StressTestModelMonitor``, which compares losses and norms.

    Args:
        step_interval: Steps from one comparison to the next.
        gradients: Compare the reduced gradients, too. Both this comparison and the hashes before an
            update need the event ``on_pre_optimizer_step``, which a loop of your own must send.
        stop: Raise ``RuntimeError`` on all ranks when replicas differ.
        folder: Run folder; ``None`` for ``args.output_dir``.

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
        self._step_interval = check_int("step_interval", step_interval, minimum=1)
        self._gradients = check_bool("gradients", gradients)
        self._stops = check_bool("stop", stop)
        self._folder = directory_name("folder", folder)
        self._log: AnomalyLog | None = None
        self._forget()

    def _forget(self) -> None:
        self._reads = DeferredReads()
        self._after_update: Tensor | None = None
        self._differing: dict[str, frozenset[str]] = {}
        self._last_equal: dict[str, int] = {}

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Find the run folder; drop pending values of an earlier run."""
        self._log = None
        if this_rank() == 0:
            folder = run_folder(self._folder, args)
            self._log = AnomalyLog(folder, first_step=state.global_step)
        self._forget()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        model: nn.Module | None = None,
        **__: Any,
    ) -> None:
        """Report the last comparison; compare weights again, and gradients if they are due."""
        del args
        self._reads.flush()
        step = state.global_step + 1
        if self._after_update is not None and model is not None:
            before, self._after_update = self._after_update, None
            self._compare(step, "weight", trainable(model), before)
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
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Report the last comparison; compare weights if they are due."""
        del args
        self._reads.flush()
        if model is not None and state.global_step % self._step_interval == 0:
            self._after_update = self._compare(state.global_step, "weight", trainable(model))
        if control.should_save:
            # A stock Trainer does not call `on_pre_save`. This flag is the same on all ranks.
            self._reads.flush()

    def on_pre_save(self, *_: Any, **__: Any) -> None:
        """Report the last comparison; before a save, so that its record is in the checkpoint."""
        self._reads.flush()

    on_train_end = on_pre_save

    def _compare(
        self, step: int, where: str, tensors: Mapping[str, Tensor], before: Tensor | None = None
    ) -> Tensor | None:
        """Start a comparison; return all ranks' hashes (``None`` if nothing can be compared)."""
        whole = {name: t for name, t in tensors.items() if not is_distributed(t)}
        if num_ranks() == 1 or not whole:
            return None
        of_ranks = gather_on_all(bitwise_hashes(list(whole.values())))
        found = _Hashes(step, where, tuple(whole), of_ranks, before)
        differ = (of_ranks != of_ranks[0]).any().float().reshape(1)
        self._reads.submit(differ, functools.partial(self._receive, found))
        return of_ranks

    def _receive(self, found: _Hashes, differ: Sequence[float]) -> None:
        known = self._differing.get(found.where, frozenset())
        self._differing[found.where] = frozenset()
        last_equal = self._last_equal.get(found.where)
        if not differ[0]:
            self._last_equal[found.where] = found.step
            return
        differing = _differing(found)
        self._differing[found.where] = frozenset(differing)
        names = [name for name in differing if name not in known]
        if not names:
            return
        ranks, cause, explanation = _fault(found, names[0])
        anomaly = Anomaly(
            step=found.step,
            kind="replicas_differ",
            # What changed between two updates did so after the comparison in the step before.
            since=None if last_equal in {None, found.step, found.step - 1} else last_equal + 1,
            ranks=ranks,
            cause=cause,
            explanation=explanation,
            suggestion=_SUGGESTIONS.get(cause),
            layer=layer_of(names[0]),
            where=found.where,
            name=names[0],
            num_groups=len(names),
        )
        if self._log is not None:
            self._log.write(anomaly)
        if self._stops:
            msg = (
                f"{anomaly}. All ranks must have bitwise identical weights and gradients; resume "
                "from a checkpoint of an earlier step"
            )
            raise RuntimeError(msg)


def _differing(found: _Hashes) -> list[str]:
    """Return the names of tensors that differ between ranks. Synchronizes with the device."""
    columns = (found.of_ranks != found.of_ranks[0]).any(dim=0).tolist()
    return [name for name, differs in zip(found.names, columns, strict=True) if differs]


_SUGGESTIONS = {
    "weight_changed": "resume from a checkpoint of an earlier step; if no code of yours changes "
    "weights, suspect the memory of the rank",
    "rank_differs": "resume from a checkpoint of an earlier step; look for code or random numbers "
    "that are not the same on all ranks",
}


def _fault(found: _Hashes, name: str) -> tuple[tuple[int, ...], str, str]:
    """Return the ranks whose tensor changed between updates, or else the ranks in a minority.

    Synchronizes with the device.

    Returns:
        The ranks, all of them without a majority; and cause and explanation.
    """
    number = found.names.index(name)
    now = found.of_ranks[:, number].tolist()
    if found.before is not None and found.before.shape == found.of_ranks.shape:
        before = found.before[:, number].tolist()
        changed = [r for r, (a, b) in enumerate(zip(now, before, strict=True)) if a != b]
        # All ranks have changed, for example, after loading a checkpoint.
        if 0 < len(changed) < len(now):
            return tuple(changed), "weight_changed", f"{name} changed between two updates"
    usual = max(now, key=now.count)
    if 2 * now.count(usual) <= len(now):
        # Without a majority it is unknown which ranks are right, so name all ranks.
        explanation = f"{name} has no value that most ranks share, so it is unknown which differ"
        return tuple(range(len(now))), UNKNOWN_CAUSE, explanation
    ranks = tuple(rank for rank, one in enumerate(now) if one != usual)
    return ranks, "rank_differs", f"{name} is the same on most ranks, and differs here"
