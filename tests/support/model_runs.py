"""Small models to train with `Model`, and a callback that records its calls."""

import torch
from torch import Tensor, nn

from mfwrap.callbacks import Callback
from support.small_networks import labelled_batches

__all__ = ["HOOKS", "Notes", "ScriptedMetric", "batches", "classifier", "losses_by_hand", "sgd"]

HOOKS = tuple(
    f"on_{mode}_{event}"
    for mode in ("train", "eval")
    for event in ("begin", "epoch_begin", "step_begin", "step_end", "epoch_end", "end")
)


def classifier() -> nn.Module:
    """Return a small network with fixed initial weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(network: nn.Module, **settings: object) -> torch.optim.Optimizer:
    """Return SGD with momentum, so that the optimizer has state."""
    return torch.optim.SGD(
        network.parameters(), **{"lr": 0.1, "momentum": 0.9, "fused": True} | settings
    )


def losses_by_hand(
    network: nn.Module, optimizer: torch.optim.Optimizer, batches: list, epochs: int = 1
) -> list[Tensor]:
    """Train with torch alone, and return the losses."""
    losses = []
    for data, label in batches * epochs:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(data), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


class Notes(Callback):
    """Record each call of a hook, with some of MindSpore's run parameters.

    Args:
        keys: Names of the parameters to record.
        stop_at: Number of the step at whose end to request a stop; by default no stop.
    """

    def __init__(self, *keys: str, stop_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.told: list[tuple] = []
        self.outputs: list = []
        self._keys = keys
        self._stop_at = stop_at

    def __getattribute__(self, name: str) -> object:
        if name not in HOOKS:
            return super().__getattribute__(name)

        def hook(run_context: object) -> None:
            parameters = run_context.original_args()
            self.calls.append(name)
            self.told.append(tuple(parameters.get(key) for key in self._keys))
            if name == "on_train_step_end":
                self.outputs.append(parameters.net_outputs)
                if parameters.cur_step_num == self._stop_at:
                    run_context.request_stop()

        return hook


class ScriptedMetric:
    """A metric that returns the given values, one per evaluation."""

    def __init__(self, *values: float) -> None:
        self._values = list(values)

    def update(self, *_: object) -> None:
        pass

    def compute(self) -> float:
        return self._values.pop(0)

    def reset(self) -> None:
        pass


def batches(number: int = 3) -> list:
    """Return labelled batches for `classifier`."""
    return labelled_batches(number)
