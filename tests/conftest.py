"""For every test: a fixed seed, no state left over, CUDA tests only where CUDA is."""

import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from support.ranks.pool import RankPool

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of what is sampled to the slow tests; skip what needs a CUDA device."""
    families: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            families.setdefault((item.path, item.originalname), []).append(item)
    for (_, name), cases in families.items():
        marker = cases[0].get_closest_marker("fast_sample")
        if marker is not None:
            # The same ones in every run.
            choice = random.Random(name)  # noqa: S311  (a choice, no secret)
            kept = choice.sample(cases, min(marker.args[0], len(cases)))
            for case in cases:
                if case not in kept:
                    case.add_marker(pytest.mark.slow)
    _skip_without_cuda(items)


def pytest_collection_finish() -> None:
    """Let the collector leave alone what was imported: every Trainer makes it look at all of it."""
    gc.collect()
    gc.freeze()


def _skip_without_cuda(items: list[pytest.Item]) -> None:
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
