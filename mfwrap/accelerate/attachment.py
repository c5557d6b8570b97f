"""What accelerate's calls drive: the step, with the optimizers that an accelerator prepares.

An `Attachment` adds the prepared optimizers to a `mfwrap.accelerate.loop_step.LoopStep`, which does
the updates and does not depend on accelerate. `attach` runs before ``prepare``, when there are no
optimizers yet. `Attachment.build` adds them later. A loop may prepare its optimizer before its
model, or call ``prepare`` several times, so `build` runs more than once. After each ``prepare`` it
adds the optimizers whose parameters are all in prepared models. At the first backward at the
latest, it adds all other prepared optimizers.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, final

from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mfwrap.accelerate.loop_step import LoopStep
from mfwrap.accelerate.memory import Shapes, follow_forward, leave_forward
from mfwrap.accelerate.setup import (
    EMA,
    made_average,
    named_parameters_of,
    parameters_of_models,
    trained_models,
)
from mfwrap.accelerate.timing import LoopSections
from mfwrap.accelerate.window import OptimizerWindow
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.collectives import Section, rank_watch, section_clock
from mfwrap.compatibility.accelerate import data_loaders_of, models_of, optimizers_of
from mfwrap.config import StepConfig
from mfwrap.loss_scale.live import LossScale, ScaleSense
from mfwrap.memory import Training, explain_out_of_memory, is_out_of_memory
from mfwrap.outputs import StepReport
from mfwrap.preflight import Facts, num_batches, step_facts
from mfwrap.step.accelerator import scale_of
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.ranks.agreement import agreement_of
from mfwrap.step.ranks.backward_reductions import reduce_before_accumulation
from mfwrap.step.ranks.float32_gradients import Float32Gradients
from mfwrap.step.ranks.fsdp import ShardedParts, local_squares_of
from mfwrap.step.ranks.guard import LoneGuard, RankGuard, rank_guard
from mfwrap.step.ranks.local_norms import CommunicationHook
from mfwrap.tensors.wrappers import distributed_parts, unwrapped_optimizer


class LoopObserver(Protocol):
    """What an attached step tells an object that follows its loop."""

    def before_save(self, folder: Path) -> None:
        """Write pending records, and own files into the checkpoint; called on every rank.

        Args:
            folder: Temporary folder of the checkpoint.
        """

    def after_save(self, folder: Path) -> None:
        """Learn that a checkpoint is complete; called on every rank.

        Args:
            folder: Path of the checkpoint.
        """

    def after_load(self, folder: Path) -> None:
        """Restore what `before_save` has written; called on every rank.

        Args:
            folder: Folder of the checkpoint, which may lack the files.
        """

    def after_backward(self) -> None:
        """Write pending records: the last backward of an update is queued. Called on every rank."""

    def before_log(self, step: int | None) -> None:
        """Write pending records of an earlier step, because ``accelerator.log`` was called.

        A loop may call it on one rank alone, so this method must not start a collective.

        Args:
            step: Step that the loop passes; ``None`` if it passes none.
        """

    def before_end(self) -> None:
        """Write pending records, because ``end_training`` is about to close the trackers."""


class Checkpoints(Protocol):
    """Saves and loads the step in ``save_state`` and ``load_state``."""

    are_async: bool
    """Whether the loop asks for checkpoints that are written in the background."""

    def saving(self, output_dir: Any, save: Callable[[str], Any], *, is_safe: bool) -> Any:
        """Call accelerate's ``save_state``; see `AttachedCheckpoints`."""

    def settle(self) -> None:
        """Wait for the checkpoint that is being written."""

    def look(self) -> None:
        """Complete a checkpoint that is written, if that takes no time."""

    def loading(self, folder: str | Path | None, load: Callable[[], Any]) -> Any:
        """Call accelerate's ``load_state``; see `AttachedCheckpoints`."""

    def detach(self) -> None:
        """Leave the accelerator."""


@final
class Attachment:
    """The step of an accelerate loop, its ranks, its observers and its checkpoints.

    Args:
        accelerator: Accelerator, which still has its own gradient scaler, if any.
        config: Settings of the step.
        ema: As in `attach`.
        scale_sense: As in `attach`.
        communication_hook: As in `attach`.
        checkpoints_of: Makes what saves and loads the attachment.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: StepConfig,
        ema: EMA | None,
        scale_sense: ScaleSense | None,
        communication_hook: CommunicationHook | None,
        checkpoints_of: "Callable[[Attachment, Accelerator], Checkpoints]",
    ) -> None:
        self.config = config
        """Settings of the step."""
        self.ema = ema if isinstance(ema, ExponentialMovingAverage) else None
        """Average of the weights. ``None`` if the step keeps no average, or if a callable makes the
        average and ``prepare`` has not called it yet."""
        self._make_ema = None if isinstance(ema, ExponentialMovingAverage) else ema
        self.accelerator = accelerator
        """Accelerator that the step is attached to."""
        self._communication_hook = communication_hook
        self._distributed_parts: list[DistributedDataParallel] = []
        if scale_sense is None:
            scale_sense = scale_of(accelerator)
        self.step = LoopStep(config, LossScale(scale_sense, accelerator.device))
        """Step that the accelerator's calls run."""
        self.has_grad_scaler = accelerator.scaler is not None
        """Whether the accelerator has a gradient scaler of its own."""
        self.numbers_micro_batches = False
        """Whether the loop uses ``accelerator.accumulate``. If so, ``accelerator.step`` numbers the
        micro-batches of an update: 1, 2, ..., and 0 for the data loader's last micro-batch."""
        self.max_grad_norm: float | None = None
        """Limit of the loop's last ``clip_grad_norm_``; ``None`` before one with a finite limit of
        the L2 norm."""
        self.answers_late = False
        """Whether ``optimizer_step_was_skipped`` returns False if the true answer would synchronize
        with the device. The Trainer reads it after every step."""
        self.ranks = LoopRanks(accelerator, self._distributed_parts, config)
        """Check of the ranks that update the models together."""
        self.sections = LoopSections()
        """Times of the sections of the loop's steps."""
        self._shapes: Shapes = {}
        """Shapes of the tensors of the last micro-batch, by name."""
        self._float32: Float32Gradients | None = None
        self.is_weightless = False
        """Whether ``accelerator.backward`` multiplies losses by 0, so that gradients are 0."""
        self.is_loading = False
        """Whether optimizer states are being loaded. If so, ``optimizer.step()`` calls torch's
        optimizer directly instead of doing an update."""
        self.hides_optimizers = False
        """Whether prepared optimizers return no state, because a copy of it is written later."""
        self.observers: list[LoopObserver] = []
        """Objects that follow the loop, such as `mfwrap.callbacks.LoopMonitor`."""
        self.checkpoints = checkpoints_of(self, accelerator)
        """Saving and loading in ``save_state`` and ``load_state``."""

    @property
    def last_report(self) -> StepReport | None:
        """Report of the last update of any optimizer; ``None`` before the first update."""
        return self.step.last_report

    def flush(self) -> None:
        """Wait for the results of the last update; see `AttachedStep.flush`."""
        self.step.flush()

    def release(self, *, scaled: bool) -> None:
        """Flush the step, and hand the gradients back that no update has used.

        Args:
            scaled: Whether the loop expects scaled gradients.
        """
        try:
            self.flush()
        finally:
            self.checkpoints.detach()
            self.sections.detach()
            leave_forward(self)
            for window in self.step.windows.values():
                window.hand_back(scaled=scaled)
                window.update.read_own_gradients(None)
            self._leave_float32()

    def prepared_optimizers(self) -> list[Optimizer]:
        """Return the optimizers that the accelerator has prepared, without wrappers."""
        return [wrapper.optimizer for wrapper in optimizers_of(self.accelerator)]

    def see_model(self, prepared: nn.Module) -> None:
        """Record a prepared model, and its DistributedDataParallel modules."""
        reduce_before_accumulation(prepared)
        self._leave_float32()
        known = self._distributed_parts
        known += [part for part in distributed_parts(prepared) if part not in known]
        self.sections.see_model(prepared)
        follow_forward(prepared, self)
        # Start the watch of the ranks, so that it answers even if this rank never gets a batch.
        rank_watch()

    def build(self, *, final: bool = False, in_step: bool = False) -> None:
        """Add the prepared optimizers to the step; create the average if `attach` got a callable.

        If there is nothing to add, the call is cheap.

        Args:
            final: Whether all models are prepared by now. If so, an optimizer is added even if some
                of its parameters are in no prepared model.
            in_step: Whether a backward of this step has made this call already. If so, a change of
                an optimizer's parameters is noticed only if their number has changed.

        Raises:
            ValueError: If `attach` got a callable for the average and there is not exactly one
                trained model, or if no optimizer holds any of the averaged parameters.
        """
        models = models_of(self.accelerator)
        if self._make_ema is not None and self.ema is None:
            trained = trained_models(models, optimizers_of(self.accelerator))
            if trained or final:
                self.ema = made_average(self._make_ema, trained)
        if self.ema is not None and not self.step.windows:
            self.ema.check_placement()
            self.step.follow(self.ema)
        for wrapper in optimizers_of(self.accelerator):
            optimizer = wrapper.optimizer
            window = self.step.windows.get(optimizer)
            if window is not None and window.update.parameters.are_current(quickly=in_step):
                continue
            named, are_complete = named_parameters_of(optimizer, models)
            if final or are_complete:
                parameters = TrainedParameters(
                    named,
                    optimizer,
                    self.config.local_norm_groups,
                    present=functools.partial(parameters_of_models, tuple(models)),
                )
                self._add(optimizer, parameters)
                # An optimizer may be added before another one that was prepared earlier.
                self.step.arrange(self.prepared_optimizers())
        if final:
            self.step.check_average()
        is_asked_for = self.config.accumulate_allreduce_grads_in_fp32
        if is_asked_for and self.step.windows and self._float32 is None:
            self._float32 = Float32Gradients(models, self._distributed_parts)

    def begin_backward(self, loss: Tensor, *, multiplies: bool) -> Tensor:
        """Prepare the backward of a micro-batch; return its loss times the loss scale.

        Args:
            loss: Loss of the micro-batch.
            multiplies: As in `LoopStep.scaled`.
        """
        self.build(final=True)
        number = self.accelerator.step if self.numbers_micro_batches else None
        loss = self.step.scaled(loss, number, multiplies=multiplies)
        if section_clock.is_on:
            self.sections.follow(loss)
        if self._float32 is not None:
            # Most loops say whether more micro-batches follow. In others, the second backward
            # before an update shows that they accumulate.
            is_first = all(window.num_backward == 1 for window in self.step.windows.values())
            self._float32.accumulate(on=not (self.accelerator.sync_gradients and is_first))
            self._float32.begin_backward()
        return loss

    def end_backward(self) -> None:
        """Complete the gradients of the last backward."""
        if self._float32 is not None:
            self._float32.end_backward()

    @property
    def windows(self) -> dict[Optimizer, OptimizerWindow]:
        """Window of each prepared optimizer, in the order in which they were prepared.

        Adds optimizers that were prepared since the last backward, and parameters that were added
        to an optimizer since.
        """
        self.build(final=True, in_step=True)
        return self.step.windows

    def update(self, optimizer: Optimizer) -> None:
        """Do the update of one optimizer; see `LoopStep.update`.

        Args:
            optimizer: Optimizer without accelerate's wrapper.
        """
        if self.checkpoints.are_async:
            self.checkpoints.look()
        self.build(final=True, in_step=True)
        with self.explaining_memory(Section.UPDATE), self.ranks.updating(ends=True):
            self.step.update(optimizer, self.accelerator.gradient_accumulation_steps)

    @contextlib.contextmanager
    def explaining_memory(self, section: Section) -> Iterator[None]:
        """Explain an error for lack of memory that is raised within the block."""
        try:
            yield
        except RuntimeError as error:
            is_update = section is Section.UPDATE
            self.explain_out_of_memory(error, section, None if is_update else self._num_backward)
            raise

    def explain_out_of_memory(
        self, error: BaseException, section: Section, micro_batch: int | None = None
    ) -> None:
        """Add a note to an error for lack of memory; see `mfwrap.memory.explain_out_of_memory`.

        Args:
            error: Any error.
            section: Section of the step.
            micro_batch: Number of the micro-batch in its update, from 1; ``None`` outside of
                forward and backward.
        """
        if not is_out_of_memory(error):
            return
        models, window = models_of(self.accelerator), next(iter(self.step.windows.values()), None)
        number = self.accelerator.gradient_accumulation_steps
        training = Training(
            networks=models,
            is_sharded=bool(ShardedParts(*models).units),
            accumulates=not self.accelerator.sync_gradients or max(number, micro_batch or 1) > 1,
            reduces_each=self.config.sync_each_batch,
            average=self.ema,
        )
        explain_out_of_memory(
            error,
            self.accelerator.device,
            section,
            training,
            step=1 if window is None else window.update.counts.num_updates + 1,
            micro_batch=_numbered(micro_batch, number),
            shapes=None if micro_batch is None else self._shapes,
        )

    def after_forward(self, shapes: Shapes, error: BaseException | None) -> None:
        """Note the shapes of a micro-batch, and explain an error of its forward."""
        self._shapes = shapes
        if error is not None:
            self.explain_out_of_memory(error, Section.FORWARD_BACKWARD, self._num_backward + 1)

    @property
    def _num_backward(self) -> int:
        """Number of micro-batches of this update whose backward has begun."""
        return max((window.num_backward for window in self.step.windows.values()), default=0)

    def _leave_float32(self) -> None:
        if self._float32 is not None:
            self._float32.accumulate(on=False)
            self._float32 = None

    def _add(self, optimizer: Optimizer, parameters: TrainedParameters) -> None:
        parts = self._distributed_parts
        self.step.add(
            optimizer,
            parameters,
            local_squares=local_squares_of(
                parts,
                ShardedParts(*models_of(self.accelerator)),
                parameters.tensors,
                self._communication_hook,
                are_asked_for=self.config.local_norm,
            ),
            agreement=agreement_of(parts, parameters.tensors),
        )

    def clear(self) -> None:
        """Flush the step, then drop everything that was prepared."""
        try:
            self.flush()
        finally:
            self.step.clear()
            leave_forward(self)
            self._leave_float32()
            self._distributed_parts.clear()
            # The models that are prepared next are compared across ranks again.
            self.ranks = LoopRanks(self.accelerator, self._distributed_parts, self.config)
            if self._make_ema is not None:
                self.ema = None


def _numbered(micro_batch: int | None, number: int) -> str:
    if micro_batch is None:
        return ""
    # A loop of its own way, and a Trainer, do not tell the accelerator how many there are.
    return f"{micro_batch} of {number}" if number > 1 else str(micro_batch)


@final
class LoopRanks:
    """Check the ranks before the first update of a loop, and watch them in every update.

    Args:
        accelerator: Accelerator of the loop.
        parts: List of the prepared models' DistributedDataParallel modules. The caller appends to
            this list when it prepares another model.
        config: Settings of the step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parts: Sequence[DistributedDataParallel],
        config: StepConfig,
    ) -> None:
        self._accelerator = accelerator
        self._parts = parts
        self._config = config
        self.are_checked = False
        """Whether the ranks have been compared already, as `MFTrainer` does."""

    def updating(self, *, ends: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for an update or a part of it; see `RankGuard.updating`."""
        return contextlib.nullcontext() if self._guard is None else self._guard.updating(ends=ends)

    @functools.cached_property
    def _guard(self) -> RankGuard | LoneGuard | None:
        # The first update reads this property, when all models are prepared.
        models = models_of(self._accelerator)
        sharded = ShardedParts(*models)
        # A loop may draw as many batches as it likes, so their numbers may differ.
        trained = {
            f"optimizer_{index}.{name}": parameter
            for index, optimizer in enumerate(optimizers_of(self._accelerator))
            for name, parameter in named_parameters_of(optimizer.optimizer, models)[0].items()
        }
        guard = rank_guard(trained, self._parts, sharded, self._facts, warned=["data"])
        if guard is not None:
            guard.is_checked = self.are_checked
        return guard

    def _facts(self) -> Facts:
        accelerator = self._accelerator
        optimizers = [unwrapped_optimizer(each) for each in optimizers_of(accelerator)]
        lengths = {
            f"number of batches of data loader {index}": str(num_batches(each))
            for index, each in enumerate(data_loaders_of(accelerator))
        }
        return step_facts(models_of(accelerator), optimizers, self._config) | {"data": lengths}
