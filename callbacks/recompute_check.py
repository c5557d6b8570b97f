"""Run a step a second time every few steps, and compare the two runs bit by bit."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.nn import SyncBatchNorm
from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap import DeferredReads
from mfwrap.arguments import check_int, directory_name
from mfwrap.callbacks.culprit.anomaly_log import Anomaly, AnomalyLog
from mfwrap.callbacks.culprit.notes import Note
from mfwrap.callbacks.culprit.recomputed import NUM_MEASURED, RecomputeJudge, device_name
from mfwrap.callbacks.culprit.replay.recompute import StepRepetition, StepRuns
from mfwrap.callbacks.shared.run_folder import run_folder
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.training_weights import monitors_training
from mfwrap.callbacks.training_state.culprit_finder import is_compiled
from mfwrap.collectives import section_clock, this_rank
from mfwrap.compatibility.fully_shard import groups_of
from mfwrap.tensors.shards import is_distributed
from mfwrap.tensors.wrappers import (
    FSDP,
    PipelineStages,
    distributed_parts,
    is_instance_of,
    sharded_parts,
    unwrapped_network,
)
from mfwrap.trainer import MonitorCallback

_NUM_MEASURED = 5
"""Number of repetitions of a step in which is measured what is not deterministic. A sum of two
orders has one of two results: with five repetitions it rarely shows the same one six times."""


@final
@monitors_training
class RecomputeCheck(MonitorCallback):
    """Find a device that computes wrongly without an error (silent data corruption).

    Every `step_interval` steps, before the update, this rank runs the forward and backward of the
    step's micro-batches again, from the same weights, buffers, random states and inputs.
    Fingerprints of what each module receives and returns, of the gradients of both, and of the
    rank's own gradients of weights are compared bit by bit on the device, and read one step later.
    The first tensor that differs is written to the rank's ``anomalies.jsonl`` (kind
    ``"recompute_differs"``) with rank, device, module and micro-batch. The training is bitwise the
    one without the check.

    The first two checked steps are run again five times, to measure which tensors differ because
    the program is not deterministic. A note names them, and neither they nor what is computed from
    them are taken for faults. What begins to be nondeterministic later is.

    A step is not judged if an input or a weight is changed in place between the forward and the
    update; a note says so once. The device is never accused of a difference in an input. A step
    that a graph captures, whose loop calls the network several times before a backward or runs two
    backward passes through one call, or that raises an error when it is run again, ends the checks
    with a warning. Under ``fully_shard`` such an error is raised: a rank cannot leave the gathers
    alone.

    A checked step takes the time of `repeats` more forward and backward passes, without the
    reductions between ranks, and of the fingerprints. It takes memory for a second set of this
    rank's gradients. The gradients of the network's outputs are kept, too, as far as the loop
    computes the loss from them. The other steps cost nothing.

    All ranks must have the callback, with the same settings. The forward must have no effects but
    on buffers and on the generators of Python, NumPy and torch: a module that counts its calls
    counts the repetitions, too. Weights that are corrupted before the step are the same in both
    runs; `ReplicaCheck` finds them.

    Source: Hochschild et al., "Cores that don't count", 2021; Dixit et al., "Silent Data
    Corruptions at Scale", 2021; MindSpore, ``NPU_ASD_ENABLE``, which judges the size of gradients.

    Args:
        step_interval: Steps from one check to the next, >= 1.
        repeats: Number of times that a checked step is run again, >= 1. With 2 or more, the result
            of most runs tells which run was wrong, and so whether the update was.
        folder: Run folder; ``None`` for ``args.output_dir``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range; at ``on_train_begin`` if steps of the network
            cannot be run again: a pipeline, a compiled network, tensor parallelism, a
            SyncBatchNorm, version 1 of FSDP, DeepSpeed, or DistributedDataParallel inside of the
            network.
    """

    def __init__(
        self, step_interval: int = 100, *, repeats: int = 1, folder: str | Path | None = None
    ) -> None:
        self._step_interval = check_int("step_interval", step_interval, minimum=1)
        self._repeats = check_int("repeats", repeats, minimum=1)
        self._folder = directory_name("folder", folder)
        self._network: nn.Module | None = None
        self._step: StepRepetition | None = None

    def on_train_begin(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        model: nn.Module | None = None,
        **__: Any,
    ) -> None:
        """Check that steps can be run again, and find the run folder."""
        self._stop_following()
        self._network = _network_of(model, args)
        device = next((p.device for p in self._network.parameters()), torch.device("cpu"))
        folder = run_folder(self._folder, args)
        self._log = AnomalyLog(folder, this_rank(), first_step=state.global_step)
        self._judge = RecomputeJudge(this_rank(), device_name(device))
        self._reads = DeferredReads()
        self._num_measured = 0
        self._sees_updates = False

    def on_step_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Follow the forward and backward of the step if it is to be checked."""
        del args
        self._stop_following()
        if self._network is not None and (state.global_step + 1) % self._step_interval == 0:
            self._step = StepRepetition(self._network)

    def on_pre_optimizer_step(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Report the last check; run the step again if it is to be checked."""
        del args
        self._flush()
        self._sees_updates = True
        step, self._step = self._step, None
        if step is None or self._network is None:
            return
        if step.has_begun_late or (reason := step.why_impossible()):
            step.close()
            if not step.has_begun_late:
                self._give_up(reason)
            return
        if changed := step.changed():
            step.close()
            self._write(self._judge.changed(state.global_step + 1, changed))
            return
        times = self._repeats
        if self._num_measured < NUM_MEASURED:
            self._num_measured += 1
            times = max(times, _NUM_MEASURED)
        try:
            with section_clock.left_out():
                runs = step.repeat(times)
        except Exception as error:  # (the code of the network, and of its hooks, may raise any)
            if sharded_parts(self._network):
                raise  # the other ranks wait for this one in a gather
            reason = f"running one again raised {type(error).__name__}: {error}"
            if isinstance(error, torch.OutOfMemoryError):
                reason = "the device has no memory for a second set of gradients"
            self._give_up(reason)
            return
        differs = (runs.hashes != runs.hashes[0]).any().float().reshape(1)
        self._reads.submit(differs, functools.partial(self._receive, state.global_step + 1, runs))

    def on_step_end(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """Report the last check if a checkpoint is due."""
        del args, state
        if self._step is not None and not self._sees_updates:
            self._give_up("the loop does not send `on_pre_optimizer_step`")
        if control.should_save:
            # A stock Trainer does not call `on_pre_save`.
            self._flush()

    def on_pre_save(self, *_: Any, **__: Any) -> None:
        """Report the last check; before a save, so that its record is in the checkpoint."""
        self._flush()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Report what is known, and stop following the network."""
        self._flush()
        self._stop_following()
        if self._network is not None:
            self._write(self._judge.end())
            self._network = None

    def _stop_following(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None

    def _give_up(self, reason: str) -> None:
        self._stop_following()
        self._write(self._judge.end())
        self._network = None
        run_logger(__name__).warning("RecomputeCheck cannot run the steps again: %s", reason)

    def _flush(self) -> None:
        if self._network is not None:
            self._reads.flush()

    def _receive(self, number: int, runs: StepRuns, differs: Sequence[float]) -> None:
        self._write(self._judge.add(number, runs if differs[0] else None))

    def _write(self, found: Sequence[Anomaly | Note]) -> None:
        for one in found:
            self._log.write(one)


def _network_of(model: nn.Module | None, args: TrainingArguments | None) -> nn.Module:
    """Return the network whose steps are run again.

    Raises:
        ValueError: If this rank cannot repeat them, or not without an effect on other ranks.
    """
    reason = "the loop passes no `model`"
    if model is not None:
        network = unwrapped_network(model)
        reason = _obstacle(network, args)
        if not reason:
            return network
    msg = f"RecomputeCheck cannot run the steps again: {reason}; leave it out"
    raise ValueError(msg)


def _obstacle(network: nn.Module, args: TrainingArguments | None) -> str:
    """Return why steps of a network cannot be run again; empty if they can be."""
    groups = [group for part in sharded_parts(network) for group in groups_of(part)]
    whole = {
        id(weight)
        for group in groups
        for weight in group.parameters
        if is_distributed(weight) and weight.device_mesh.size() <= group.mesh.size()
    }
    modules = list(network.modules())
    obstacles = {
        "a pipeline's ranks share each micro-batch": isinstance(network, PipelineStages),
        "the network is compiled, and hooks would change its code": is_compiled(network, args),
        "tensor parallelism shares each micro-batch among ranks": any(
            is_distributed(each) and id(each) not in whole for each in network.parameters()
        ),
        "a SyncBatchNorm shares its statistics among ranks": any(
            isinstance(each, SyncBatchNorm) for each in modules
        ),
        "DistributedDataParallel inside of the network reduces gradients": bool(
            distributed_parts(network)
        ),
        "version 1 of FSDP replaces the weights": any(
            is_instance_of(each, FSDP, "FullyShardedDataParallel") for each in modules
        ),
        "DeepSpeed has its own backward": is_instance_of(network, "deepspeed", "DeepSpeedEngine"),
    }
    return next((reason for reason, is_so in obstacles.items() if is_so), "")
