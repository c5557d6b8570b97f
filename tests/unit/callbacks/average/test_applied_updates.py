"""Applied updates are distinguished from skipped updates without a host read."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback

from mfwrap.callbacks import EMACallback
from mfwrap.callbacks.average.ema_callback import AppliedUpdates
from support.half_precision import StockHalf
from support.host_reads import HostReads
from support.resumed_training import PLAIN, new_trainer

OPTIMIZERS = {
    "fused": lambda weights: torch.optim.AdamW(weights, fused=True),
    "foreach": lambda weights: torch.optim.AdamW(weights, fused=False),
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1),
    "fused sgd": lambda weights: torch.optim.SGD(weights, 0.1, fused=True),
}
BAD = (False, True, True, False, True, False, False)


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_scaled_optimizer(make, clips):
    """An update counts as applied if and only if it changed the weights."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
    network, optimizer = accelerator.prepare(*pair(make))
    updates = AppliedUpdates(optimizer)
    for is_bad in BAD:
        before = network.weight.detach().clone()
        accelerator.backward(network(torch.full((1, 2), torch.inf if is_bad else 1.0)).sum())
        if clips:
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with HostReads() as reads:
            applied = updates.last()

        assert not reads.names
        assert (applied is None or bool(applied)) == (not torch.equal(before, network.weight))
        assert applied is None or (applied.dtype, applied.shape) == (torch.bool, ())


def pair(make):
    """Return a network with its optimizer."""
    network = nn.Linear(2, 1, bias=False)
    return network, make(network.parameters())


def test_an_optimizer_without_scaler():
    """Without a gradient scaler every update counts as applied, even with a NaN gradient."""
    network, optimizer = pair(OPTIMIZERS["sgd"])
    updates = AppliedUpdates(optimizer)
    for value in (1.0, torch.nan):
        network.weight.grad = torch.full_like(network.weight, value)
        optimizer.step()

        assert updates.last() is None


def test_a_hook_that_is_taken_off():
    """``close`` removes the hook from the optimizer, and may be called twice."""
    _, optimizer = pair(OPTIMIZERS["sgd"])
    before = dict(optimizer._optimizer_step_pre_hooks)
    updates = AppliedUpdates(optimizer)

    assert dict(optimizer._optimizer_step_pre_hooks) != before
    updates.close()
    updates.close()
    assert dict(optimizer._optimizer_step_pre_hooks) == before


class Foreign:
    """An optimizer that is not a torch optimizer, such as DeepSpeed's."""

    def __init__(self, *, step_was_skipped) -> None:
        self.step_was_skipped = step_was_skipped


def test_an_optimizer_of_another_kind():
    """A foreign optimizer's ``step_was_skipped`` decides whether its update was applied.

    Without an optimizer every update counts as applied.
    """
    assert not AppliedUpdates(Foreign(step_was_skipped=True)).last()
    assert AppliedUpdates(Foreign(step_was_skipped=False)).last() is None
    assert AppliedUpdates(None).last() is None
    AppliedUpdates(None).close()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_stock_trainer_in_fp16_reads_no_more(tmp_path, optim):
    """The callback adds no host read to the steps of a stock Trainer in fp16."""

    def reads(callbacks):
        counted = Counting()
        trainer = new_trainer(
            tmp_path, PLAIN, kind=StockHalf, fp16=True, optim=optim, max_steps=4,
            save_strategy="no", logging_strategy="no", callbacks=[*callbacks, counted],
        )  # fmt: skip
        trainer.train()
        return counted.names

    without = reads([])
    assert sorted(without) == [1, 2, 3]
    assert reads([EMACallback(0.5)]) == without


class Counting(TrainerCallback):
    """Count host reads from the end of one step to the end of the next step."""

    def __init__(self) -> None:
        self.names = {}
        self._reads = None

    def on_step_end(self, _args, state, _control, **_) -> None:
        """End the current count and begin a new count."""
        if self._reads is not None:
            self._reads.__exit__(None, None, None)
            self.names[state.global_step - 1] = self._reads.names
        self._reads = HostReads()
        if state.global_step < state.max_steps:
            self._reads.__enter__()
