"""Judge each step on the device, and some steps' weights, optimizer state and buffers."""

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap import StepReport
from mfwrap.callbacks.culprit.judges.course import LossCourse
from mfwrap.callbacks.culprit.judges.forward import ForwardJudge
from mfwrap.callbacks.culprit.judges.settings import SettingWatch
from mfwrap.callbacks.culprit.judges.state import StateJudge
from mfwrap.callbacks.culprit.judges.step import JudgedStep, StepJudge
from mfwrap.callbacks.culprit.judges.updates import Change, UpdateSample, ordinary_update
from mfwrap.collectives import gather_objects, num_ranks, this_rank
from mfwrap.compatibility.graphs import idle_in_graphs
from mfwrap.tensors.shards import on_device
from mfwrap.tensors.wrappers import frozen_weights, trainable, unwrapped_optimizer


@final
class Judges:
    """Judge each step by the steps before, without host-device synchronization.

    Args:
        network: Network whose weights are judged; ``None`` if unknown.
        state_interval: Steps from one sample of weights, optimizer state and buffers to the next.
        step: Finished steps.
    """

    def __init__(self, network: nn.Module | None, state_interval: int, step: int = 0) -> None:
        self.states = None if network is None else StateJudge(network, step)
        self.forward = ForwardJudge()
        self.course = LossCourse()
        """Course of this rank's loss, which the finder follows."""
        self.settings = SettingWatch(network)
        self._network = network
        self._interval = state_interval
        self._steps: StepJudge | None = None
        self._names: tuple[str, ...] = ()
        self._scalars: set[str] = set()
        self._updates: UpdateSample | None = None
        self._frozen: tuple[str, ...] = ()
        self._of_frozen: UpdateSample | None = None
        self._frozen_change: Tensor | None = None
        self._change: Change | None = None
        self._hears_updates = False
        self._step = step + 1
        self._optimizer: Optimizer | None = None
        self._followed: list[int] = []
        self._hooks = contextlib.ExitStack()
        self._saved: Mapping[str, Any] | None = None
        self._is_first = True
        self._of_ranks: list[dict[str, Any]] | None = None
        self._sample_updates()

    def begin_step(self, step: int, optimizer: Any = None) -> None:
        """Tell changes of the weights before the step from its update.

        From now on, the update is measured right before and after each ``optimizer.step``, with
        hooks on the optimizer: what a loop does with the weights at any other time is no update.

        Args:
            step: Number of this step: the finished steps plus one.
            optimizer: Optimizer with or without wrappers; ``None`` if unknown. If `attach` has more
                optimizers, each of them is followed.
        """
        self._step = step
        self._follow(_all_of(optimizer))
        if self._updates is not None and not self._hears_updates:
            self._updates.begin()

    def _follow(self, optimizers: list[Optimizer]) -> None:
        if not optimizers or self._followed == [id(each) for each in optimizers]:
            return
        self.close()
        self._optimizer = optimizers[0]
        self._followed = [id(each) for each in optimizers]
        # An optimizer outlives a monitor that nobody has closed.
        itself = weakref.ref(self)

        @idle_in_graphs
        def before(*_: Any) -> None:
            judges = itself()
            if judges is not None:
                judges.before_update()

        @idle_in_graphs
        def after(*_: Any) -> None:
            judges = itself()
            if judges is not None:
                judges.after_update()

        for optimizer in optimizers:
            self._hooks.callback(optimizer.register_step_pre_hook(before).remove)
            self._hooks.callback(optimizer.register_step_post_hook(after).remove)

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        self._hooks.close()
        self._optimizer, self._followed = None, []

    def before_update(self) -> None:
        """Tell changes of the weights up to here from the update that follows."""
        self._hears_updates = True
        self.settings.look(self._step, self._optimizer)
        for sample in (self._updates, self._of_frozen):
            if sample is not None:
                sample.begin()

    def after_update(self) -> None:
        """Measure the update; what changes the weights from here to the next one is none."""
        if self._updates is not None:
            found = self._updates.measure()
            self._change = found if self._change is None else self._change.followed_by(found)
        if self._of_frozen is not None:
            self._frozen_change = self._of_frozen.measure().outside

    def end_step(
        self,
        step: int,
        output: Any,
        report: StepReport | None,
        applied: Tensor | None,
        optimizer: Any = None,
        *,
        measures_updates: bool = True,
    ) -> JudgedStep:
        """Judge a step, and include it in what is usual.

        Args:
            step: Finished steps, this one included.
            output: Output of the step: a named tuple, or the loss as a tensor.
            report: Report of the step; ``None`` if unknown.
            applied: Whether the update was applied, shape ``()``, bool; ``None`` if unknown.
            optimizer: Optimizer with or without wrappers; ``None`` if unknown.
            measures_updates: Whether the weights have changed by one update since the last call.
        """
        if not self._hears_updates:
            self.settings.look(step, optimizer)
        loss = output if isinstance(output, Tensor) else output.loss
        norms = getattr(output, "local_norm", None)
        names = () if report is None or norms is None else tuple(report.local_norm_names)
        rates = getattr(output, "learning_rate", None)
        if report is not None:
            rates = report.learning_rates
        if applied is None:
            applied = torch.ones((), dtype=torch.bool, device=loss.device)
        judge = self._judge_of(names, loss.device)
        change, self._change = self._change, None
        if change is None and self._updates is not None and measures_updates:
            change = self._updates.measure()
        judged = judge.judge(
            getattr(output, "global_norm", None),
            norms if names else None,
            change,
            None if rates is None or not rates.numel() else rates,
            applied,
            of_frozen=self._change_of_frozen(),
            rate_factor=1.0 if report is None else report.learning_rate_factor,
            ordinary_update=ordinary_update(optimizer),
        )
        self._of_ranks = None
        unknown = judged.summary.new_full((2,), torch.nan)
        found = (self._sampled(step, optimizer, judge), self.forward.take())
        known = [unknown if one is None else on_device(one, unknown.device) for one in found]
        return judged._replace(
            summary=torch.cat([judged.summary, *known]),
            optimizer=optimizer,
            forward=self.forward.last,
        )

    def _change_of_frozen(self) -> Tensor | None:
        """Return by how much frozen weights have changed since the last step, but by no update."""
        change, self._frozen_change = self._frozen_change, None
        if change is None and self._of_frozen is not None:
            self._of_frozen.begin()
            change = self._of_frozen.measure().outside
        return change

    def _sampled(self, step: int, optimizer: Any, judge: StepJudge) -> Tensor | None:
        """Return the scores of a sample of the state, if it is time for one."""
        is_first, self._is_first = self._is_first, False
        if self.states is None:
            return None
        if step % self._interval == 0:
            found = self.states.sample(step, optimizer)
            self._sample_updates()
            judge.begin_travel()
            return found
        if is_first:
            # Now the optimizer has a state.
            self.states.look(step, optimizer)
            judge.begin_travel()
        return None

    def forget(self, *, global_norm: bool, others_alike: bool) -> None:
        """Forget how far the numbers of the last step were from the usual ones.

        Args:
            global_norm: Whether to forget that of the global norm, too.
            others_alike: Whether to forget earlier losses of this rank that were as far, too.
        """
        self.course.forget(others_alike=others_alike)
        if self._steps is not None:
            self._steps.forget(global_norm=global_norm)

    def _sample_updates(self) -> None:
        """Follow the weights, if others are trained now or if they have moved to other memory."""
        if self._network is None:
            return
        weights, frozen = trainable(self._network), frozen_weights(self._network)
        if not frozen:
            self._of_frozen, self._frozen = None, ()
        elif self._of_frozen is None or not self._of_frozen.is_of(list(frozen.values())):
            self._of_frozen, self._frozen = UpdateSample(list(frozen.values())), tuple(frozen)
            self._frozen_change = None
        if self._updates is None or not self._updates.is_of(list(weights.values())):
            self._updates, self._change = UpdateSample(list(weights.values())), None
            self._names = tuple(weights)
            self._scalars = {name for name, weight in weights.items() if weight.numel() == 1}

    def _judge_of(self, names: tuple[str, ...], device: torch.device) -> StepJudge:
        judge = self._steps
        watched = (*self._names, *self._frozen)
        if judge is None or (judge.names, judge.weights, judge.watched) != (
            names,
            self._names,
            watched,
        ):
            saved = self._saved if judge is None else judge.state_dict()
            judge = self._steps = StepJudge(names, self._names, device, self._scalars, self._frozen)
            if saved is not None:
                judge.load_state_dict(saved)
        return judge

    def gather(self) -> None:
        """Gather what is usual on all ranks, so that `state_dict` has it. Call it on every rank."""
        self._of_ranks = gather_objects(self._own_state())

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual, ready for JSON; synchronizes with the device.

        Returns:
            One state for each rank under ``of_ranks``. If `gather` was not called since the last
            step, there is only the state of this rank.
        """
        return {"of_ranks": self._of_ranks or [self._own_state()]}

    def _own_state(self) -> dict[str, Any]:
        return {
            "steps": self._saved if self._steps is None else self._steps.state_dict(),
            "states": None if self.states is None else self.states.state_dict(),
            "forward": self.forward.state_dict(),
            "course": self.course.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Each rank loads the state that it saved. If the saved run had only ``n`` ranks, rank ``r``
        loads the state of rank ``r % n``: another rank's norms are the best estimate.
        """
        own = state["of_ranks"][this_rank() % len(state["of_ranks"])]
        self._steps, self._saved = None, own["steps"]
        # Until the next step, all ranks are as they were saved, and need not gather again.
        is_whole = len(state["of_ranks"]) == num_ranks()
        self._of_ranks = list(state["of_ranks"]) if is_whole else None
        if self.states is not None and own["states"] is not None:
            self.states.load_state_dict(own["states"])
            self._is_first = False
        if own["forward"] is not None:
            self.forward.load_state_dict(own["forward"])
        if "course" in own:  # missing in checkpoints of 0.1.0
            self.course.load_state_dict(own["course"])


def _all_of(optimizer: Any) -> list[Optimizer]:
    """Return an optimizer without wrappers, and the others of its `attach`."""
    attachment = getattr(optimizer, "attachment", None)
    own = unwrapped_optimizer(optimizer)
    others = (
        [] if attachment is None else [each for each in attachment.step.windows if each is not own]
    )
    return [each for each in (own, *others) if isinstance(each, Optimizer)]
