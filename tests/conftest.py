"""For every test: a fixed seed, no state left over, CUDA tests only where CUDA is."""

import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from rank_pool import RankPool

settings.register_profile(
    "mfwrap",
    deadline=None,
    # The same cases in every run, on every machine: a failure that comes and goes teaches nothing.
    derandomize=True,
    database=None,
    max_examples=25,
    # The first example pays for what torch loads late.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mfwrap")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``cuda`` on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory) -> Iterator[RankPool]:
    """Two processes that are ranks of one group."""
    with RankPool(2, tmp_path_factory.mktemp("two_ranks")) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _independent_test() -> Iterator[None]:
    """Seed torch before each test; afterwards forget the settings that accelerate shares."""
    torch.manual_seed(0)
    default_dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(default_dtype)
    if "accelerate" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
