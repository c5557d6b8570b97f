"""The maps of local norms show the norms of the run."""

import numpy as np
import pytest

from mfwrap.records.run_record import read_run
from mfwrap.report.norm_maps import norms_by_rank, norms_by_step
from support.run_folders import GROUPS, write_lines, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the record of a run on two ranks."""
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "one", num_ranks=2))


def test_local_norms(run):
    """Each rank has a map with its norms in the hover text; only the first map is visible."""
    first, second = norms_by_step([run])[0].figure.data

    assert (first.visible, second.visible) == (True, False)
    assert first.y == GROUPS
    assert first.customdata[1][3] == pytest.approx(2 / 4)
    assert second.customdata[2][9] == pytest.approx(6 / 10)
    assert first.z[1][3] == pytest.approx(np.log10(2 / 4))
    assert first.z[0][19] is None


def test_many_steps_share_a_column(tmp_path):
    """A column of several steps shows their largest norm."""
    lines = [{"step": s, "local_norm": {"a": 100.0 if s == 1999 else 1.0}} for s in range(1, 2001)]
    write_lines(tmp_path / "metrics.jsonl", lines)

    (norms,) = norms_by_step([read_run(tmp_path)])[0].figure.data

    assert len(norms.x) <= 800
    assert [x for x, z in zip(norms.x, norms.customdata[0], strict=True) if z == 100.0] == [1999]


def test_layer_by_rank(run):
    """Each step has a map; only the map of the last step is visible."""
    figure = norms_by_rank([run])[0].figure

    *others, last = figure.data
    assert (last.visible, {other.visible for other in others}) == (True, {False})
    assert last.x == ("rank 0", "rank 1")
    assert last.customdata[2] == pytest.approx((3 / 40, 6 / 40))
    assert figure.layout.sliders[0].steps[-1].label == "40"


def test_runs_without_several_ranks(tmp_path):
    """A run on one rank has no map by rank, and a run without norms has no map at all."""
    one = read_run(write_run(tmp_path / "one"))
    write_lines(tmp_path / "none" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    none = read_run(tmp_path / "none")

    assert norms_by_rank([one, none]) == []
    assert norms_by_step([none]) == []
