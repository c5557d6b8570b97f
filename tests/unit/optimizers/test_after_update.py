"""What acts after an update is found by its hook, and sees what kernels have skipped."""

import torch
from torch import nn
from torch.optim import SGD, AdamW

from mfwrap.optimizers.after_update import AfterUpdate, acting_after, was_applied
from mfwrap.optimizers.chained import ChainedOptimizer


class Noting(AfterUpdate):
    """Note whether each step was applied."""

    def __init__(self, optimizer) -> None:
        self.applied: list[bool] = []
        self.hook = optimizer.register_step_post_hook(self._note)

    def discard(self) -> None:
        """Forget everything."""
        self.applied.clear()

    def _note(self, optimizer, *_) -> None:
        self.applied.append(was_applied(optimizer, torch.device("cpu")).item())


def test_steps_that_kernels_skip():
    """A part of a chain that skips is enough; an optimizer without a flag has applied its step."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    adamw = AdamW(first.parameters(), lr=0.1, fused=True)
    chain = ChainedOptimizer(adamw, SGD(second.parameters(), lr=0.1))
    noting, other = Noting(chain), Noting(adamw)
    adamw.register_step_post_hook(lambda *_: None)
    for flag in (None, 0.0, 1.0):
        if flag is not None:
            adamw.found_inf = torch.tensor(flag)
        second(first(torch.ones(1, 2))).sum().backward()
        chain.step()
    assert noting.applied == other.applied == [True, True, False]
    assert list(acting_after(chain)) == [noting, other]
    other.hook.remove()
    assert list(acting_after(chain)) == [noting]
    assert list(acting_after(adamw)) == []
