"""Seed every test, reset shared state after it, and skip CUDA tests where there is no CUDA."""

import gc
import os
import random
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from mfwrap.compatibility.foreign import ReleaseError, is_installed
from mfwrap.compatibility.transformers import TRAINER_RELEASE
from support.browser import CHROMIUM, open_browser
from support.deferral import late_results
from support.one_rank import one_rank
from support.optional_packages import absent_package
from support.ranks.pool import RankPool

# No test cuts the power, and waiting for the disk takes a sixth of the time of the fast tests.
# tests/project/test_crash_points.py checks in processes of its own which files are synced.
os.fsync = os.fstat

# cuBLAS computes the same bits in every run only with a workspace of a fixed size, which it takes
# from this variable when it starts. Processes that tests start inherit it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# A shell starts what runs in the background so that it ignores Ctrl-C. The trainings that tests
# interrupt inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "mfwrap",
    deadline=None,
    # Generate the same examples in every run and on every machine, so that failures are
    # reproducible.
    derandomize=True,
    database=None,
    max_examples=25,
    # The first example is slow because torch imports some of its modules on first use.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mfwrap")


class _TestFile(pytest.Module):
    """A test file, which is skipped if an import fails because an optional package is absent."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except (self.CollectError, SystemExit) as error:
            _skip_if_absent(error)
            raise


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Collect each test file as a `_TestFile`."""
    return _TestFile.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Skip a test if one of its fixtures imports an optional package that is absent."""
    yield from _skipped_if_absent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test if it imports an optional package that is absent."""
    yield from _skipped_if_absent()


def _skipped_if_absent() -> Iterator[None]:
    try:
        yield
    except (ImportError, SystemExit) as error:
        _skip_if_absent(error)
        raise


def _skip_if_absent(error: BaseException) -> None:
    """Skip if an optional package is absent, or a library is too old for what is tested."""
    # pytest raises an error of its own from that of an import, and mfwrap.cli ends with a sentence.
    for each in (error, error.__cause__ or error.__context__):
        if isinstance(each, ReleaseError):
            pytest.skip(str(each))
        if isinstance(each, ImportError) and _is_of_old_transformers(each):
            pytest.skip(f"needs transformers {TRAINER_RELEASE}: {each.msg}")
        name = absent_package(each)
        if name is not None:
            pytest.skip(f"needs {name}")


def _is_of_old_transformers(error: ImportError) -> bool:
    """Return whether a transformers that is too old for MFTrainer lacks a name or a module."""
    is_old = not is_installed("transformers", TRAINER_RELEASE)
    return is_old and (error.name or "").partition(".")[0] == "transformers"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark ``fast_sample`` cases outside a fixed sample as slow; skip CUDA tests without CUDA."""
    families: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            families.setdefault((item.path, item.originalname), []).append(item)
    for (_, name), cases in families.items():
        marker = cases[0].get_closest_marker("fast_sample")
        if marker is not None:
            # Seed the generator with the test's name, so that every run samples the same cases.
            choice = random.Random(name)  # noqa: S311  (sampling, not cryptography)
            kept = choice.sample(cases, min(marker.args[0], len(cases)))
            for case in cases:
                if case not in kept:
                    case.add_marker(pytest.mark.slow)
    _skip_without_cuda(items)


def pytest_collection_finish() -> None:
    """Freeze all imported objects."""
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Freeze, at the end of a file, what its tests have imported."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Spare the objects that live by now later garbage collections: each Trainer makes several."""
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
    """Start two processes that are the ranks of one process group."""
    with RankPool(2, tmp_path_factory.mktemp("two_ranks")) as pool:
        yield pool


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless browser; the test is skipped on a machine without one."""
    pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with open_browser() as started:
        yield started


@pytest.fixture
def _late_results() -> Iterator[None]:
    """Let the results of updates on a CPU arrive as late as those of a device."""
    with late_results():
        yield


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """Make this process the only rank of a process group."""
    with one_rank():
        yield


# Where there is no GPU, torch.manual_seed keeps the text of the stack for each kind of device that
# might come, which takes a millisecond.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _independent_test() -> Iterator[None]:
    """Seed torch before each test; afterwards reset its settings and accelerate's shared state."""
    _seed(0)
    default_dtype = torch.get_default_dtype()
    products = torch.backends.cuda.matmul
    precision, of_products = torch.backends.fp32_precision, products.fp32_precision
    yield
    torch.set_default_dtype(default_dtype)
    # TrainingArguments with torch_compile or tf32 set the first for the whole process on a GPU, and
    # accelerate sets the second for a compiled network.
    torch.backends.fp32_precision = precision
    products.fp32_precision = of_products
    if "accelerate" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
