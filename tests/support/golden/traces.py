"""Load the runs recorded from MindSpore and MindFormers, and rebuild their objects in torch.

``tests/golden/README.md`` describes the format and lists the intended differences.
"""

import functools
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import mfwrap
from mfwrap import AdamWeightDecay
from support.golden.networks import MLP, HalfProbe, LinearProbe, PerToken
from support.paths import TESTS

FOLDER = TESTS / "golden"
TOLERANCE = 1e-5
"""Allowed difference of losses, norms and weights, relative to the output's largest magnitude."""


@functools.cache
def cases(family: str) -> dict[str, dict[str, Any]]:
    """Return the recorded cases of a family, by id."""
    recorded = json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))
    return {case["id"]: case for case in recorded["cases"]}


def parametrized(family: str, *, without: Collection[str] = ()) -> list[Any]:
    """Return a pytest parameter for each case of a family, with the case's id."""
    return [
        pytest.param(case, id=name) for name, case in cases(family).items() if name not in without
    ]


def floats(recorded: Any) -> Tensor:
    """Return a recorded number, or nested lists of numbers, as a float64 tensor."""
    return torch.tensor(_as_float(recorded), dtype=torch.float64)


def _as_float(recorded: Any) -> Any:
    # Strict JSON has no inf and nan: the files contain strings, which float() converts.
    return [_as_float(v) for v in recorded] if isinstance(recorded, list) else float(recorded)


def tensor(recorded: Mapping[str, Any]) -> Tensor:
    """Return a recorded tensor with its dtype and shape."""
    values = floats(recorded["data"]).to(getattr(torch, recorded["dtype"]))
    return values.reshape(recorded["shape"])


def assert_same(actual: Any, recorded: Any, *, relative: float = 0.0) -> None:
    """Assert that an output agrees with its recording, with inf and nan at the same places.

    Args:
        actual: A tensor, or nested lists of numbers, with as many elements as `recorded`.
        recorded: Numbers as they are in the JSON file.
        relative: Largest allowed difference, relative to the largest finite recorded magnitude.
    """
    expected = floats(recorded)
    finite = expected[expected.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64).reshape(expected.shape),
        expected,
        rtol=0,
        atol=relative * largest,
        equal_nan=True,
    )


def network_of(case: Mapping[str, Any]) -> nn.Module:
    """Return the network of a case with its initial weights."""
    arguments = {name: value for name, value in case["network"].items() if name != "kind"}
    kind = case["network"]["kind"]
    weights = {p["name"]: tensor(p) for p in case["params"]}
    if kind in {"LinearProbe", "HalfProbe"}:
        return {"LinearProbe": LinearProbe, "HalfProbe": HalfProbe}[kind](weights)
    network = {"MLP": MLP, "PerToken": PerToken}[kind](**arguments)
    network.load_state_dict(weights)
    return network


class EarlyEpsilonAdam(Optimizer):
    """Adam as MindSpore's ``nn.Adam``: epsilon is added before the bias correction, not after."""

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self) -> None:
        """Apply ``p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)``."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(t=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter))
                state["t"] += 1
                gradient = parameter.grad + group["weight_decay"] * parameter
                m = state["m"].lerp_(gradient, 1 - beta1)
                v = state["v"].lerp_(gradient.square(), 1 - beta2)
                corrected = math.sqrt(1 - beta2 ** state["t"]) / (1 - beta1 ** state["t"])
                parameter.sub_(group["lr"] * corrected * m / (v.sqrt() + group["eps"]))


_OPTIMIZERS: dict[str, Any] = {
    "SGD": SGD,
    "Momentum": SGD,
    "Adam": Adam,
    "AdamWeightDecay": AdamWeightDecay,
    "MFAdamW": AdamW,
}


def optimizer_of(
    case: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    *,
    fused: bool,
    kind: type[Optimizer] | None = None,
) -> tuple[Optimizer, LambdaLR]:
    """Return the optimizer and the schedule of a case; a fixed rate gives a constant schedule.

    Args:
        case: Recorded case with an optimizer.
        parameters: Parameters of the network by name.
        fused: Whether to use the fused form.
        kind: Optimizer class to use instead. It need not have a fused form.
    """
    recorded = case["optimizer"]
    arguments = dict(recorded["args"])
    loss_scale = arguments.pop("loss_scale", None)
    weight_decay = arguments.pop("weight_decay", 0.0)
    if "beta1" in arguments or "beta2" in arguments:
        arguments["betas"] = (arguments.pop("beta1", 0.9), arguments.pop("beta2", 0.999))
    if kind is None:
        arguments["fused"] = fused
    groups, factors = [], []
    for group in recorded.get("groups", [{"params": list(parameters)}]):
        decay = group.get("weight_decay", weight_decay)
        rate, factor = _rate(case, group)
        for decayed in (True, False):
            names = [n for n in group["params"] if _decays(recorded["class"], n) is decayed]
            if names:
                groups.append(
                    {
                        "params": [parameters[name] for name in names],
                        "weight_decay": decay if decayed else 0.0,
                        "lr": rate,
                    }
                )
                factors.append(factor)
    made: Any = _OPTIMIZERS[recorded["class"]] if kind is None else kind
    optimizer = made(groups, lr=0.0, **arguments)
    if loss_scale is not None:
        _divide_gradients(optimizer, loss_scale)
    return optimizer, LambdaLR(optimizer, factors)


def _decays(optimizer: str, name: str) -> bool:
    return optimizer == "MFAdamW" or not ("beta" in name or "gamma" in name)


def _rate(
    case: Mapping[str, Any], group: Mapping[str, Any]
) -> tuple[float, Callable[[int], float]]:
    """Return a group's base rate, and the rate's factor as a function of applied updates."""
    rate = group.get("lr", case["optimizer"]["lr"])
    if rate["kind"] == "fixed":
        return rate["value"], lambda _: 1.0
    recorded = case["lr_by_global_step"]
    rates = torch.tensor(rate["values"]).tolist() if "lr" in group else recorded
    # LambdaLR also computes a rate after the last update. The recording ends before that rate, so
    # repeat the last recorded rate.
    return 1.0, lambda position: rates[min(position, len(rates) - 1)]


def _divide_gradients(optimizer: Optimizer, loss_scale: float) -> None:
    """Divide gradients before each step, as MindSpore's optimizers do for ``loss_scale``."""

    def divide(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / loss_scale

    optimizer.register_step_pre_hook(divide)


def scale_sense_of(recorded: Mapping[str, Any]) -> Any:
    """Return the argument ``scale_sense`` of a case: a number, a tensor or an update cell."""
    if recorded["kind"] in {"float", "int"}:
        return recorded["value"]
    if recorded["kind"] == "tensor":
        return torch.full(recorded["shape"], recorded["value"])
    arguments = {name: value for name, value in recorded.items() if name != "kind"}
    return getattr(mfwrap, recorded["kind"])(**arguments)
