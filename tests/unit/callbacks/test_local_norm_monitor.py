"""The main process writes the local norms of all ranks."""

import math

import pytest

from mfwrap.callbacks import LocalNormMonitor
from mfwrap.checkpoints.written_files import LIST
from mfwrap.records.run_record import read_run
from support.ranks.monitors import gather_norms


def test_every_ranks_norms_are_in_the_record(two_ranks, tmp_path):
    """At each step of the interval, the run's files get the local norms of every rank."""
    folder = tmp_path / "run"
    ranks = two_ranks.run(gather_norms, str(folder), {"step_interval": 2})
    record = read_run(folder)

    assert list(record.local_norms) == [0, 1]
    for rank, trained in enumerate(ranks):
        for index, name in enumerate(trained["names"]):
            curve = record.local_norms[rank][name]
            assert curve.steps == [2, 4]
            assert curve.values == pytest.approx(trained["norms"][1::2, index].tolist())
        assert trained["gathers"] == 2
    assert not ranks[0]["norms"].allclose(ranks[1]["norms"], rtol=0.01)


def test_curves_of_each_rank(two_ranks, tmp_path):
    """Each rank has TensorBoard curves in a folder of its own."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = {"tensorboard_dir": str(tmp_path / "events")}
    ranks = two_ranks.run(gather_norms, str(tmp_path / "run"), settings)
    for rank, trained in enumerate(ranks):
        events = accumulator.EventAccumulator(str(tmp_path / "events" / f"rank_{rank}"))
        events.Reload()
        for index, name in enumerate(trained["names"]):
            scalars = events.Scalars(f"local_norm/{name}")
            assert [scalar.step for scalar in scalars] == [1, 2, 3, 4]
            expected = trained["norms"][:, index].tolist()
            assert [scalar.value for scalar in scalars] == pytest.approx(expected)


def test_one_process_writes_its_own(tmp_path):
    """A single process writes its local norms without a gather."""
    trained = gather_norms(0, str(tmp_path), {})

    assert list(read_run(tmp_path).local_norms) == [0]
    assert trained["gathers"] == 0


def test_without_local_norms_it_says_so_once(tmp_path, caplog):
    """If the step has no local norms, one warning says so and nothing is written."""
    gather_norms(0, str(tmp_path), {"local_norm": False})

    (record,) = caplog.records
    assert "the step has no local norms" in record.message
    assert [path.name for path in tmp_path.iterdir()] == [LIST]


def test_a_folder_is_needed():
    """Without ``args.output_dir``, `folder` is required."""
    with pytest.raises(ValueError, match="LocalNormMonitor needs `folder`"):
        gather_norms(0, None, {})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"step_interval": 0}, ValueError, "`step_interval` must be"),
        ({"step_interval": math.pi}, TypeError, "`step_interval` must be"),
        ({"folder": 3}, TypeError, "`folder` must be a path or None, got 3"),
    ],
)
def test_wrong_arguments(settings, error, message):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=message):
        LocalNormMonitor(**settings)
