"""Stable ranks, compared with singular value decompositions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mfwrap.callbacks.training_state.stable_rank import StableRankSettings, spectrum, tagged_spectra


@given(
    shape=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    decay=st.floats(0.1, 0.6),
    seed=st.integers(0, 99),
)
def test_against_singular_values(shape, decay, seed):
    """Stable rank and eigenvalue agree with the known singular values of a matrix."""
    generator = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(shape[0], shape[0], generator=generator).double())
    right, _ = torch.linalg.qr(torch.randn(shape[1], shape[1], generator=generator).double())
    values = 3.0 * decay ** torch.arange(min(shape)).double()
    matrix = left[:, : len(values)] * values @ right[:, : len(values)].t()
    found = spectrum(matrix.float(), 30)

    assert found.eigenvalue.item() == pytest.approx(9.0, rel=1e-3)
    expected = (values.square().sum() / 9).item()
    assert found.stable_rank.item() == pytest.approx(expected, rel=1e-3)


def test_five_iterations_come_near():
    """Five iterations find the largest eigenvalue of a random weight to within 20 percent."""
    torch.manual_seed(0)
    weight = torch.randn(64, 48)
    found = spectrum(weight, 5)
    largest = torch.linalg.svdvals(weight.double())[0].item() ** 2

    assert 0.8 * largest < found.eigenvalue.item() <= largest * (1 + 1e-5)


def test_experts_and_types():
    """Each expert has its own result, bfloat16 is accepted, and no random number is drawn."""
    torch.manual_seed(0)
    weight = torch.randn(3, 6, 5).bfloat16()
    state = torch.get_rng_state()
    together = spectrum(weight, 5)

    assert torch.equal(state, torch.get_rng_state())
    assert together.stable_rank.dtype == torch.float32
    for number in range(3):
        apart = spectrum(weight[number], 5)
        assert together.stable_rank[number] == pytest.approx(apart.stable_rank.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "ends"),
    [
        ("full", ["expert_0", "expert_1"]),
        ("statistics", ["expert_max", "expert_min", "expert_mean"]),
        ("all", ["expert_0", "expert_1", "expert_max", "expert_min", "expert_mean"]),
    ],
)
def test_tags(mode, ends):
    """Tags agree with MindFormers; vectors and weights outside of `target` have no tag."""
    weights = {
        "experts.up": torch.stack([torch.eye(3), torch.diag(torch.tensor([2.0, 0, 0]))]),
        "linear.weight": torch.eye(4) * 3,
        "linear.bias": torch.ones(3),
        "other.weight": torch.eye(2),
    }
    settings = StableRankSettings(format=("log",), target=("experts", "linear"), moe_show_mode=mode)
    tags, values = tagged_spectra(weights, settings)
    found = dict(zip(tags, torch.cat(list(values)).tolist(), strict=True))
    ranks = {"0": 3.0, "1": 1.0, "max": 3.0, "min": 1.0, "mean": 2.0}
    eigenvalues = {"0": 1.0, "1": 4.0, "max": 4.0, "min": 1.0, "mean": 2.5}

    expected = {"weight_stable_rank/linear.weight": 4.0, "weight_eigenvalue/linear.weight": 9.0}
    for end in ends:
        word = end.removeprefix("expert_")
        expected[f"weight_stable_rank/experts.up/{end}"] = ranks[word]
        expected[f"weight_eigenvalue/experts.up/{end}"] = eigenvalues[word]
    # The default of five power iterations is accurate to 1 % for these matrices.
    assert found == pytest.approx(expected, rel=0.01)


@pytest.fixture
def mesh(tmp_path):
    """Return a device mesh of this process alone."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("whole", [False, True])
def test_a_sharded_weight(whole, mesh):
    """On one rank, a sharded weight has the same result with and without `do_aggregation`."""
    weight = distribute_tensor(torch.diag(torch.tensor([2.0, 1.0, 0.0])), mesh, [Shard(0)])
    settings = StableRankSettings(format=("log",), do_aggregation=whole, power_iteration_num=20)
    _, (rank, eigenvalue) = tagged_spectra({"w": weight}, settings)

    assert (rank.item(), eigenvalue.item()) == pytest.approx((1.25, 4.0), rel=1e-4)
