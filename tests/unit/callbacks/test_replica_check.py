"""A single bit that differs between replicas is found, and its rank is named."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import multiprocessing, nn
from transformers import TrainerControl, TrainerState

from mfwrap.callbacks import ReplicaCheck, replica_check
from mfwrap.callbacks.replica_check import bitwise_hashes
from support.replica_ranks import NUM_RANKS, run_rank
from support.spoilt.blocks import records_of

MODULUS = 2**64
DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool),
    *(torch.complex64, torch.int64),
]


def plain_hash(tensor) -> int:
    """Return the hash of a tensor, computed with Python's unbounded integers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = real.contiguous().reshape(-1).view(sizes[real.element_size()]).tolist()
    total = sum(bit * ((i * 0x1E3779B97F4A7C15 % MODULUS) | 1) for i, bit in enumerate(bits))
    return (total + MODULUS // 2) % MODULUS - MODULUS // 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hashes(dtype, monkeypatch):
    """Hashes agree with exact integer arithmetic, for every dtype and layout, also in chunks."""
    tensors = [
        (torch.randn(5, 7) * 50).to(dtype),
        (torch.randn(7, 5) * 50).to(dtype).t(),
        torch.ones(()).to(dtype),
        torch.ones(0).to(dtype),
    ]
    expected = [plain_hash(tensor) for tensor in tensors]

    assert bitwise_hashes(tensors).tolist() == expected
    monkeypatch.setattr(replica_check, "_CHUNK", 4)
    assert bitwise_hashes(tensors).tolist() == expected


@given(index=st.integers(0, 99), bit=st.integers(0, 31), seed=st.integers(0, 9))
def test_a_flipped_bit(index, bit, seed):
    """Flipping any bit, or swapping two elements, changes the hash."""
    torch.manual_seed(seed)
    tensor = torch.randn(100)
    flipped, exchanged = tensor.clone(), tensor.clone()
    # Bit 31 is the sign bit of an int32. Its mask, 1 << 31, is too large for an int32, so use
    # -(2**31), which has only this bit set.
    flipped.view(torch.int32)[index] ^= (1 << bit) if bit < 31 else -(2**31)
    exchanged[[index, (index + 1) % 100]] = exchanged[[(index + 1) % 100, index]]
    hashes = bitwise_hashes([tensor, flipped, exchanged]).tolist()

    assert len(set(hashes)) == 3


def test_zeros_of_both_signs():
    """Positive and negative zeros have different hashes."""
    first, second = bitwise_hashes([torch.zeros(2), -torch.zeros(2)]).tolist()

    assert first != second


def test_one_process(tmp_path):
    """With one process, nothing is compared or written."""
    callback = ReplicaCheck(1, gradients=True, stop=True, folder=tmp_path)
    state, control = TrainerState(global_step=1), TrainerControl()
    for event in ("on_train_begin", "on_pre_optimizer_step", "on_step_end", "on_train_end"):
        getattr(callback, event)(None, state, control, model=nn.Linear(2, 2))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"step_interval": 0}, ValueError, "`step_interval` must be >= 1, got 0"),
        ({"step_interval": 1.0}, TypeError, "`step_interval` must be an int, got 1.0"),
        ({"gradients": 1}, TypeError, "`gradients` must be a bool, got 1"),
        ({"stop": None}, TypeError, "`stop` must be a bool, got None"),
        ({"folder": 1}, TypeError, "`folder` must be a path or None, got 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(settings, error, message):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=re.escape(message)):
        ReplicaCheck(**settings)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the folder of a run on three ranks, and the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=NUM_RANKS)
    return folder, [torch.load(folder / f"rank{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.slow
def test_replicas_that_are_the_same(ranks):
    """If the replicas are identical, nothing is written and no rank stops."""
    folder, results = ranks

    assert records_of(folder / "same") == []
    assert [result["same"] for result in results] == [[1, 2, 3, 4, 5, 6]] * NUM_RANKS


@pytest.mark.slow
@pytest.mark.parametrize(("case", "rank"), [("weight", 2), ("gradient", 1)])
def test_a_bit_on_one_rank(case, rank, ranks):
    """A flipped bit on one rank gives one record with step, weight and rank."""
    folder, _ = ranks
    (record,) = records_of(folder / case)
    expected = {"step": 4, "kind": "replicas_differ", "ranks": [rank], "layer": "1"}

    assert record == expected | {"where": case, "name": "1.weight", "num_groups": 1}


@pytest.mark.slow
def test_stop(ranks):
    """With ``stop=True`` all ranks raise before the next update."""
    _, results = ranks

    assert [result["stop"] for result in results] == [
        (
            "step 4: replicas differ in layer 1 on rank 0: 1.weight differs. All ranks must have "
            "bitwise identical weights and gradients; resume from a checkpoint of an earlier step"
        )
    ] * NUM_RANKS


@pytest.mark.slow
def test_time_is_the_main_processs(ranks):
    """All ranks request checkpoints at the steps that the main process's clock determines."""
    _, results = ranks

    assert [result["saves"] for result in results] == [[4, 8, 12]] * NUM_RANKS
