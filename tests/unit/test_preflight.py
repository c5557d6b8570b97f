"""Ranks are compared before training: model, settings, versions, and room for a checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mfwrap import AdamWeightDecay, StepConfig
from mfwrap.preflight import (
    check_ranks_agree,
    checkpoint_bytes,
    disk_problem,
    model_facts,
    num_batches,
    optimizer_facts,
    setting_facts,
    step_facts,
    version_facts,
)
from support.ranks.preflight import DISAGREEMENTS, agree, disagree


def test_a_model_is_described_by_shape_dtype_and_whether_it_is_trained():
    """A frozen parameter and a buffer of another dtype are visible in the facts."""
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    network[0].bias.requires_grad_(requires_grad=False)

    facts = model_facts(network)

    assert facts["parameter 0.weight"] == "float32[3, 2]"
    assert facts["parameter 0.bias"] == "float32[3], frozen"
    assert facts["buffer 1.num_batches_tracked"] == "int64[]"


def test_settings_have_no_addresses():
    """Functions, objects and tensors are described by text that is the same in every process."""
    facts = setting_facts(StepConfig(local_norm=True, local_norm_groups=str.upper))
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.5))

    assert facts["local_norm_groups"] == "<method 'upper' of 'str' objects>"
    assert "max_grad_norm" not in setting_facts(StepConfig(), ["max_grad_norm"])
    assert optimizer_facts(optimizer)["lr of group 0"] == "0.5"
    assert optimizer_facts(optimizer)["params of group 0"] == "1"
    lambdas = setting_facts(StepConfig(local_norm_groups=lambda name: name))
    assert " at 0x" not in lambdas["local_norm_groups"]


def test_versions_are_those_of_imported_packages():
    """Packages that are not imported take no part in the training."""
    facts = version_facts()

    assert facts["torch"] == torch.__version__
    assert "python" in facts


def test_a_full_disk_is_found_before_training(tmp_path):
    """A folder that does not exist yet is on the disk of its parent."""
    problem = disk_problem(tmp_path / "not" / "there", 10**18)

    assert disk_problem(tmp_path / "not" / "there", 1000) is None
    assert problem.startswith("a checkpoint takes at least 1000000000.0 GB, but ")
    assert str(tmp_path / "not" / "there") in problem


def test_a_relative_folder(tmp_path, monkeypatch):
    """The disk of a relative folder is found, too."""
    monkeypatch.chdir(tmp_path)

    assert disk_problem(Path("run"), 1000) is None


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (torch.optim.AdamW, 3),
        (lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), 2),
        (lambda weights: torch.optim.SGD(weights, lr=0.1), 1),
    ],
    ids=["AdamW", "SGD with momentum", "SGD"],
)
def test_bytes_of_a_checkpoint(tmp_path, make, copies):
    """The estimate is at most 10 % below the size of the files that torch writes, never above."""
    network = nn.Linear(100, 100)
    optimizer = make(network.parameters())
    network(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    torch.save(network.state_dict(), tmp_path / "weights")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer")
    written = sum(path.stat().st_size for path in tmp_path.iterdir())

    assert checkpoint_bytes(network, optimizer) == copies * 10_100 * 4
    assert 0.9 * written < checkpoint_bytes(network, optimizer) <= written
    assert checkpoint_bytes(network, has_average=True) == 2 * 10_100 * 4


def test_bytes_of_a_float32_state():
    """The float32 moments of half-precision weights count with four bytes each."""
    network = nn.Linear(100, 100).bfloat16()
    optimizer = AdamWeightDecay(network.parameters(), fp32_state=True)

    assert checkpoint_bytes(network, optimizer) == 10_100 * (2 + 2 * 4)


def test_lengths_of_data_loaders():
    """A loader without a length has an unknown number of batches."""
    assert num_batches([1, 2]) == 2
    assert num_batches(iter([])) is None


def test_one_rank_agrees_with_itself():
    """A single rank can still have a problem."""
    network = nn.Linear(2, 1)
    facts = step_facts([network], [torch.optim.SGD(network.parameters(), lr=0.1)], StepConfig())

    check_ranks_agree(facts)
    with pytest.raises(RuntimeError, match=r"^cannot start training: the disk is full \(rank 0\)$"):
        check_ranks_agree(facts, ["the disk is full"])


@pytest.mark.slow
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree(two_ranks, name):
    """Both ranks raise the same error, which says what differs and on which rank."""
    first, second = two_ranks.run(disagree, name)

    assert first == second == f"cannot start training: {DISAGREEMENTS[name][1]}"


@pytest.mark.slow
def test_ranks_that_agree(two_ranks):
    """Ranks that agree may train. If a topic in `warned` differs, a warning is logged."""
    warnings, _ = two_ranks.run(agree)

    assert warnings == ["ranks differ: data: number of batches is 8 on rank 0 but 9 on rank 1"]
