"""Run whole updates from memory that stays the same, so that a graph of the device can hold them.

A graph (a CUDA graph, for example) records the kernels of a piece of code once, with the addresses
that they read and write. Replaying it takes one call of the host, whatever the number of kernels.
So the host no longer decides how fast a small network trains. What the host did in a step must then
happen on the device, or between two replays:

- The batch is copied into tensors that stay the same (`StaticBatch`).
- The learning rates of the coming updates are on the device (`RateTable`).
- The counts of updates, and everything else that a step sets to a new tensor, are copied back into
  their old memory at the end of the step (`replaced` of the parts of the update).
- The report is copied out of the graph's memory (`StaticResults`).
- The results of the last update are read after the next replay is queued. So the schedule and an
  error about too many skips come one update later than in a step that is not captured.

The first updates run without a graph: the optimizer makes its state, and libraries choose their
kernels. They run on the stream of the capture, because autograd remembers the stream on which it
first saw a parameter. Then one update is captured, and replayed at once: the capture itself
computes nothing. On a CPU every update runs without a graph, from the same memory.

Source: PyTorch, "CUDA semantics", whole-network capture; Megatron-LM, ``FullCudaGraphWrapper``.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.collectives import section_clock
from mfwrap.compatibility.graphs import capturing, is_idle, lacks_graphs, new_graph
from mfwrap.compatibility.torch import step_hooks
from mfwrap.loss_scale.live import LossScale
from mfwrap.memory import is_out_of_memory
from mfwrap.optimizers.chained import parts_of
from mfwrap.outputs import StepReport
from mfwrap.step.accumulation import GradientAccumulation
from mfwrap.step.calls import NetworkCall
from mfwrap.step.pipeline import PipelineAccumulation
from mfwrap.step.rate_table import RateTable, fixed_settings
from mfwrap.step.static_memory import StaticBatch, StaticResults
from mfwrap.step.update import StepUpdate

WARM_UP = 3
"""Number of updates before the capture."""


@final
class CapturedStep:
    """Do whole updates, from the second half of the first few on as replays of one graph.

    Args:
        accumulate: Forward and backward of the micro-batches.
        update: What follows backward; its schedule must be `rates`.
        optimizer: Optimizer without accelerate's wrapper.
        loss_scale: Live loss scale.
        ema: Average that follows the weights; ``None`` for no average.
        rates: Learning rates of the coming updates.

    Raises:
        ValueError: If a graph cannot hold the steps: of several ranks or devices, of an optimizer
            that the host skips or that has hooks, or of an average that does not follow each
            update on the device.
    """

    def __init__(
        self,
        accumulate: GradientAccumulation | PipelineAccumulation,
        update: StepUpdate,
        optimizer: Optimizer,
        loss_scale: LossScale,
        ema: ExponentialMovingAverage | None,
        rates: RateTable,
    ) -> None:
        _refuse(_obstacle(accumulate, update, optimizer, ema) or _hooked(optimizer))
        self._accumulate = accumulate
        self._update = update
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._ema = ema
        self._rates = rates
        self.before_update: list[Callable[[], None]] = []
        """Functions to call before forward. A replay calls none between backward and update."""
        self._device = update.parameters.device
        self._batch: StaticBatch | None = None
        self._results = StaticResults()
        # Memory of the tensors that a step replaces.
        self._places: list[Tensor] = []
        self._graph: Any = None
        self._is_outdated = True
        self._fixed: Any = None
        self._num_runs = 0
        is_cpu = self._device.type == "cpu"
        self._stream = None if is_cpu else torch.Stream(self._device)
        for part in parts_of(optimizer):
            # A loaded state is new tensors, which the graph does not know.
            part.register_load_state_dict_post_hook(self._forget)

    def __call__(self, calls: Sequence[NetworkCall]) -> StepReport:
        """Do one update.

        Args:
            calls: One call of the network for each micro-batch, at least one.

        Raises:
            RuntimeError: If the step cannot be captured, a monitor times the sections of the step,
                the optimizer's parameters have changed, the averages are swapped in, or too many
                updates in a row were skipped. In the last case the present update is done.
            TypeError: If the batch holds what cannot be captured, or in the cases of a step.
            ValueError: If the batch differs from the first one in more than the values of its
                tensors, a learning rate is a non-finite number, or in the cases of a step.
        """
        for call in self.before_update:
            call()
        self._check()
        if self._batch is None:
            self._batch = StaticBatch(calls, self._device)
        self._batch.load(calls)
        self._set_rates()
        self._keep_places()
        self._run(self._batch.calls)
        report, local_norm = self._results.copied()
        counts = self._update.counts
        try:
            # The device is busy with this update while the host reads the results of the last one.
            self._update.flush()
        finally:
            counts.submit(report, lambda: local_norm)
        return report

    def forget_counts(self) -> None:
        """Ask the schedule for the rates again, because a state has been loaded."""
        self._rates.forget()

    def _check(self) -> None:
        self._update.parameters.check_current()
        # New groups are copied to the device, which a capture must not do.
        self._update.parameters.groups()
        _refuse(_hooked(self._optimizer))
        if self._ema is not None:
            self._ema.begin_update()
        if section_clock.is_on:
            msg = (
                "the sections of a captured step cannot be timed; leave RankClock out, or set "
                "capture=False"
            )
            raise RuntimeError(msg)

    def _set_rates(self) -> None:
        if self._rates.is_outdated:
            self._update.flush()
            self._rates.restart(self._update.counts.applied_updates)
        self._rates.prolong()
        if self._rates.may_end:
            # The device would not find the rate of this update if the last one was applied. Advance
            # the schedule before the update, as a step that is not captured does: if it has ended,
            # it raises its own error, and no weight has changed.
            self._update.flush()
            self._rates.restart(self._update.counts.applied_updates)

    def _keep_places(self) -> None:
        """Move the state that a step replaces into the memory that the graph knows."""
        replaced = self._update.replaced()
        if not self._places:
            self._places = [getattr(owner, name).clone() for owner, name in replaced]
        _write_back(replaced, self._places)

    def _run(self, calls: Sequence[NetworkCall]) -> None:
        fixed = self._fixed_by_a_graph()
        if fixed != self._fixed:
            self._fixed, self._is_outdated = fixed, True
        if self._stream is None or self._num_runs < WARM_UP:
            with self._on_own_stream():
                self._step(calls)
            self._num_runs += 1
        elif self._is_outdated:
            # A graph that is dropped must not be running.
            torch.accelerator.synchronize(self._device)
            self._graph = None
            self._graph = self._captured(calls)
            self._is_outdated = False
            self._graph.replay()
        else:
            self._graph.replay()
            if self._ema is not None:
                self._ema.count_replay()

    def _captured(self, calls: Sequence[NetworkCall]) -> Any:
        graph = new_graph(self._device)
        try:
            with (
                self._on_own_stream(),
                capturing(graph, self._device),
                _capturable(self._optimizer),
            ):
                self._step(calls)
        except BaseException as error:
            # The capture has computed nothing, so the old memory has the present state.
            for (owner, name), place in zip(self._update.replaced(), self._places, strict=True):
                setattr(owner, name, place)
            if not isinstance(error, RuntimeError):
                raise
            # The end of a capture that has failed raises an error of its own.
            cause = error if error.__context__ is None else error.__context__
            if is_out_of_memory(cause):
                raise cause from None
            # CUDA adds some lines of advice to the first one.
            reason = str(cause).partition("\n")[0]
            msg = (
                "a step must not read a tensor on the host, or do anything else that a graph "
                f"cannot hold, with capture=True, got: {reason}"
            )
            raise RuntimeError(msg) from error
        return graph

    def _step(self, calls: Sequence[NetworkCall]) -> None:
        """Do one update from memory that stays the same."""
        update, counts = self._update, self._update.counts
        update.release_gradients()
        try:
            accumulated = self._accumulate(calls, self._loss_scale.value)
            with self._rates.in_groups(counts.applied_updates), counts.held_by(self._results.hold):
                update(accumulated)
            _write_back(update.replaced(), self._places)
        finally:
            update.release_gradients()
            self._accumulate.end_update()

    def _fixed_by_a_graph(self) -> Any:
        """Return what a graph holds as it was at the capture, and the caller may change."""
        kind = self._device.type
        parameters = self._update.parameters.tensors
        return (
            [fixed_settings(group) for group in self._optimizer.param_groups],
            [(parameter.data_ptr(), parameter.requires_grad) for parameter in parameters],
            self._accumulate.network.training,
            self._loss_scale.is_one,
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        )

    def _forget(self, _optimizer: Optimizer) -> None:
        self._is_outdated = True

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Within the block, queue work on the stream of the capture, in order with the rest."""
        if self._stream is None:
            yield
            return
        current = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with self._stream:
                yield
        finally:
            current.wait_stream(self._stream)


@torch.no_grad()
def _write_back(replaced: Sequence[tuple[object, str]], places: Sequence[Tensor]) -> None:
    """Copy tensors into the memory that they had before, and put it in their place."""
    for (owner, name), place in zip(replaced, places, strict=True):
        value = getattr(owner, name)
        if value is not place:
            place.copy_(value)
            setattr(owner, name, place)


@contextlib.contextmanager
def _capturable(optimizer: Optimizer) -> Iterator[None]:
    """Within the block, torch's optimizers do not refuse to be captured."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in groups]
    try:
        for group in groups:
            group["capturable"] = True
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value


def _obstacle(
    accumulate: GradientAccumulation | PipelineAccumulation,
    update: StepUpdate,
    optimizer: Optimizer,
    ema: ExponentialMovingAverage | None,
) -> str | None:
    """Return why no graph can hold the steps of a cell; ``None`` if one can."""
    device = update.parameters.device
    if lacks_graphs(device):
        return (
            f"on {device.type}: its graphs need torch.accelerator.Graph, which torch "
            f"{torch.__version__} lacks"
        )
    is_parallel = accumulate.distributed_parts or accumulate.sharded_parts.units
    if accumulate.are_stages or is_parallel or update.parameters.reduction is not None:
        return (
            "for a network on several ranks, whose messages are not captured: got "
            "DistributedDataParallel, fully_shard, tensor parallelism or a pipeline"
        )
    devices = sorted({str(parameter.device) for parameter in update.parameters.tensors})
    if len(devices) > 1:
        return f"for a network on several devices, got {', '.join(devices)}"
    if not update.is_fused:
        return (
            f"for {type(optimizer).__name__}, whose host reads the skip flag or the learning rate; "
            "use a fused optimizer of torch (fused=True), or AdamWeightDecay"
        )
    return None if ema is None else ema.obstacle_to_capture


def _hooked(optimizer: Optimizer) -> str | None:
    for part in parts_of(optimizer):
        hooks = [hook for hook in step_hooks(part) if not is_idle(hook)]
        if hooks:
            return (
                f"for an optimizer with hooks of its steps, which a graph does not call, got "
                f"{hooks[0]!r}"
            )
    return None


def _refuse(obstacle: str | None) -> None:
    if obstacle is not None:
        msg = f"`capture` must be False {obstacle}"
        raise ValueError(msg)
