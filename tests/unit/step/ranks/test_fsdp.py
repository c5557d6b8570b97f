"""A step on shards agrees with one process on all of the data."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

from support.fsdp.networks import NUM_STEPS, Case, micro_batches_of, new_model, optimizer_of
from support.fsdp.ranks import ranks
from support.fsdp.training import CASES, MAX_NORM, OTHER_CASES, train

__all__ = ["ranks"]


def losses_of(network: nn.Module, case: Case, step: int, rank: int):
    """Yield numerator and denominator of a rank's micro-batches, in the case's precision."""
    for inputs, labels in micro_batches_of(case, step, rank):
        dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
        tensors = {name: tensor.to(dtype) for name, tensor in network.named_parameters()}
        loss = functional_call(network, tensors, (inputs.to(dtype), labels))
        yield loss if case.per_token else (loss, 1)


def reference(case: Case, num_ranks: int) -> dict[str, Any]:
    """Return the results of plain torch in one process on the batches of all ranks."""
    network = new_model(per_token=case.per_token)
    optimizer = optimizer_of(case.optimizer, network, plain=True)
    trained = [p for p in network.parameters() if p.requires_grad]
    averages = [p.detach().clone() for p in trained]
    norms = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        denominator = 0
        for rank in range(num_ranks):
            for numerator, number in losses_of(network, case, step, rank):
                (numerator.float() * 2.0**16).backward()
                denominator = denominator + number
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad /= 2.0**16 * max(1, int(denominator))
        norms.append(clip_grad_norm_(network.parameters(), MAX_NORM))
        if denominator == 0:
            continue
        optimizer.step()
        for average, parameter in zip(averages, trained, strict=True):
            average.lerp_(parameter.detach(), 0.25)
    return {
        "norms": torch.stack(norms),
        "weights": [p.detach() for p in network.parameters()],
        "averages": averages,
    }


def case_id(case: Case) -> str:
    """Return the test id of a case: its settings, joined by commas."""
    return ", ".join(map(str, case))


@pytest.fixture(scope="module")
def run(ranks, request) -> list[dict[str, Any]]:
    """Train a case on all ranks, and return the results of each rank."""
    if request.param.layout == "partly replicated" and ranks.number == 1:
        pytest.skip("needs several ranks")
    return ranks.run(train, request.param)


def _cases(test: Any, cases: list[Case] = CASES) -> Any:
    """Parametrize a test with cases and the slow cases; the ranks train each case once."""
    marked = [pytest.param(case, case, id=case_id(case)) for case in cases]
    slow = pytest.mark.slow
    marked += [pytest.param(case, case, id=case_id(case), marks=slow) for case in OTHER_CASES]
    return pytest.mark.parametrize(("case", "run"), marked, indirect=["run"], scope="module")(test)


@_cases
def test_norms_weights_and_averages_are_those_of_one_process(ranks, case, run):
    """Norms, weights and averages agree with those of one process, in every case.

    Ranks add up in another order than one process, so sums differ by float32 rounding. Weights
    differ little, because the four updates are at most 0.1 each.
    """
    expected = reference(case, ranks.number)

    for rank in run:
        torch.testing.assert_close(rank["norms"], expected["norms"], rtol=1e-5, atol=1e-7)
        for kind in ("weights", "averages"):
            for ours, theirs in zip(rank[kind], expected[kind], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
        assert not any(rank["overflow"])
        assert rank["applied"] == NUM_STEPS - case.per_token


def _cases_with_local_norms(test: Any) -> Any:
    return _cases(test, [case for case in CASES if not case.sync_each_batch])


@_cases_with_local_norms
def test_local_norms_are_those_of_this_ranks_own_loss(case, run):
    """Local norms agree with the float64 norms of this rank's own micro-batches."""
    rtol = 1e-5 if case.precision == "float32" else 2e-2
    for index, rank in enumerate(run):
        network = new_model(per_token=case.per_token).double()
        parts = [
            network(inputs.double(), labels) for inputs, labels in micro_batches_of(case, 0, index)
        ]
        if case.per_token:
            loss = sum(total for total, _ in parts) / sum(number for _, number in parts)
        else:
            loss = sum(parts) / len(parts)
        loss.backward()
        trained = {n: p for n, p in network.named_parameters() if p.requires_grad}
        expected = torch.stack(
            [torch.zeros(()) if p.grad is None else p.grad.norm().float() for p in trained.values()]
        )

        assert [name.replace("module.", "") for name in rank["names"]] == list(trained)
        assert rank["sizes"].tolist() == [p.numel() for p in trained.values()]
        torch.testing.assert_close(rank["local norms"][0], expected, rtol=rtol, atol=1e-7)
        torch.testing.assert_close(rank["losses"][0], loss.float().detach(), rtol=rtol, atol=0)
        assert expected[:-2].min() > 0
