"""Loops and Trainers train networks that accelerate shards with FSDP2."""

import pytest
import torch
from torch import nn

from support.fsdp.accelerated import (
    NUM_STEPS,
    evaluate_averages,
    load_ignored_shards,
    reduce_with_trainer,
    resume_attached,
    rows_of,
    train_attached,
    train_with_trainer,
)
from support.small_llama import small_llama
from support.versions import needs

EXACT = {"rtol": 0, "atol": 0}
ROUNDED = {"rtol": 2e-4, "atol": 5e-5}
"""Tolerance for sums in another order. AdamW amplifies differences of gradients near zero; one of
its steps is 1e-2."""


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_attached_loop(two_ranks, accumulation):
    """A sharded attached loop trains like one process on all rows."""
    first, second = two_ranks.run(train_attached, accumulation)
    alone = train_attached(0, accumulation)

    torch.testing.assert_close(first["state"], second["state"], **EXACT)
    for step, report in enumerate(alone["reports"]):
        ranks = [result["reports"][step] for result in (first, second)]
        torch.testing.assert_close(ranks[0]["global_norm"], ranks[1]["global_norm"], **EXACT)
        torch.testing.assert_close(ranks[0]["global_norm"], report["global_norm"])
        torch.testing.assert_close((ranks[0]["loss"] + ranks[1]["loss"]) / 2, report["loss"])
    torch.testing.assert_close(first["state"], alone["state"], **ROUNDED)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_local_norms_of_an_attached_loop(two_ranks, accumulation):
    """The local norms of the first update are those of the rank's gradients before reduction."""
    for rank, result in enumerate(two_ranks.run(train_attached, accumulation)):
        torch.manual_seed(0)
        network = small_llama().double()
        for index in range(accumulation):
            rows = rows_of(0, index, rank, 2)
            (network(input_ids=rows, labels=rows).loss / accumulation).backward()
        expected = [parameter.grad.norm() for parameter in network.parameters()]

        norms = result["reports"][0]["local_norm"].double()
        torch.testing.assert_close(norms, torch.stack(expected), rtol=1e-5, atol=1e-9)


def test_an_attached_loop_reduces_each_micro_batch(two_ranks):
    """With accelerate's `sync_each_batch`, a loop reduces twice as often, with the same result."""
    once = two_ranks.run(train_attached, 2, False)  # noqa: FBT003  (arguments of a rank)
    each = two_ranks.run(train_attached, 2, True)  # noqa: FBT003  (arguments of a rank)

    for ours, expected in zip(each, once, strict=True):
        assert ours["reductions"] == 2 * expected["reductions"] > 0
        torch.testing.assert_close(ours["state"], expected["state"], **ROUNDED)
        for report, other in zip(ours["reports"], expected["reports"], strict=True):
            torch.testing.assert_close(report["global_norm"], other["global_norm"])


@pytest.mark.slow
def test_the_trainer_reduces_each_micro_batch(two_ranks, tmp_path):
    """With accelerate's `sync_each_batch`, the Trainer reduces twice as often."""
    for found in two_ranks.run(reduce_with_trainer, str(tmp_path)):
        assert found["each"]["reductions"] == 2 * found["once"]["reductions"] > 0
        assert found["each"]["norms"] == pytest.approx(found["once"]["norms"], rel=1e-5)
        torch.testing.assert_close(found["each"]["state"], found["once"]["state"], **ROUNDED)


LOADS_SHARDS = needs("accelerate", "1.13", "it does not load the state of sharded optimizers")


@pytest.mark.parametrize(
    "state_dict_type",
    [pytest.param("SHARDED_STATE_DICT", marks=LOADS_SHARDS), "FULL_STATE_DICT"],
)
def test_an_attached_loop_goes_on(two_ranks, tmp_path, state_dict_type):
    """A resumed loop equals the uninterrupted loop bitwise; the average is saved in shards."""
    for result in two_ranks.run(resume_attached, str(tmp_path / "state"), state_dict_type):
        torch.testing.assert_close(result["resumed"], result["unbroken"], **EXACT)
        assert result["applied"] == 2 * NUM_STEPS
        assert "mfwrap_step_shards" in result["files"]


def test_an_optimizer_that_accelerate_would_not_load_is_refused(two_ranks, tmp_path):
    """With accelerate 1.12, a checkpoint with a sharded optimizer is refused in one sentence."""
    for error in two_ranks.run(load_ignored_shards, str(tmp_path / "state")):
        assert "does not load the state of an optimizer that was saved in shards" in error


# Before 5.10, the Trainer does not take `state_dict_type` from its `fsdp_config`.
@LOADS_SHARDS
@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_the_trainer(two_ranks, tmp_path, state_dict_type):
    """A sharded Trainer trains like one process; a resumed run equals the uninterrupted run."""
    folders = [str(tmp_path / name) for name in ("run", "resumed")]
    checkpoint = f"{folders[0]}/checkpoint-3"
    unbroken = two_ranks.run(train_with_trainer, folders[0], None, 2, state_dict_type)
    resumed = two_ranks.run(train_with_trainer, folders[1], checkpoint, 2, state_dict_type)
    alone = train_with_trainer(0, str(tmp_path / "alone"), num_ranks=1)

    for whole_run, second_half in zip(unbroken, resumed, strict=True):
        torch.testing.assert_close(second_half["state"], whole_run["state"], **EXACT)
    for entry, expected in zip(unbroken[0]["log"], alone["log"], strict=True):
        assert entry["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert entry["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert entry["learning_rate"] == expected["learning_rate"]
        assert entry["applied_updates"] == expected["applied_updates"]
    torch.testing.assert_close(unbroken[0]["state"], alone["state"], **ROUNDED)
    assert len(alone["state"]) == 2 * len(list(nn.Module.parameters(small_llama())))


def test_the_trainer_with_averages(two_ranks, tmp_path):
    """A sharded Trainer evaluates, exports and reloads averages like one process."""
    ranks = two_ranks.run(evaluate_averages, str(tmp_path / "ranks"))
    alone = evaluate_averages(0, str(tmp_path / "alone"), 1)

    for result in ranks:
        torch.testing.assert_close(result["losses"], alone["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(result["exported"], result["averages"], **EXACT)
        torch.testing.assert_close(result["end"], result["best"], **EXACT)
        torch.testing.assert_close(result["of best"], result["best"], **EXACT)
        assert any((result["best"][n] != each).any() for n, each in result["averages"].items())
        torch.testing.assert_close(result["end"], alone["end"], **ROUNDED)
