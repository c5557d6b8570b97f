"""The maps show what was recorded for each layer, step and rank."""

import math

import numpy as np
import pytest

from mfwrap.records.run_record import read_run
from mfwrap.report.norm_maps import by_rank, families_of, maps_by_layer, norms_by_step
from support.run_folders import GROUPS, write_lines, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the record of a run on two ranks."""
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "one", num_ranks=2))


def values(drawn):
    """Return the numbers of a map, which has the logarithms times 1000."""
    rows = [[math.nan if v is None else 10 ** (v / 1000) for v in row] for row in drawn["z"]]
    return np.array(rows)


def test_local_norms(run):
    """Each rank has a map with its norms to about 0.1%; non-finite ones are listed."""
    panel = norms_by_step([run])
    first, second = panel.content["maps"]

    assert panel.content["choices"] == ["rank 0", "rank 1"]
    assert first["rows"] == list(GROUPS)
    assert values(first)[1][3] == pytest.approx(2 / 4, rel=2e-3)
    assert values(second)[2][9] == pytest.approx(6 / 10, rel=2e-3)
    assert first["bad"] == [[0, 19], [1, 19], [2, 19]]
    assert second["bad"] == []


def test_many_steps_share_a_column(tmp_path):
    """A column of several steps shows their largest norm, or that one of them is not finite."""
    odd = {1998: 100.0, 7: "nan"}
    lines = [{"step": s, "local_norm": {"a": odd.get(s, 1.0)}} for s in range(1, 2001)]
    write_lines(tmp_path / "metrics.jsonl", lines)

    (drawn,) = norms_by_step([read_run(tmp_path)]).content["maps"]

    (row,) = values(drawn)
    assert len(drawn["x"]) == len(row) <= 800
    assert [x for x, value in zip(drawn["x"], row, strict=True) if value == 100.0] == [1996]
    assert [drawn["x"][column] for _, column in drawn["bad"]] == [7]


def test_losses_by_rank(tmp_path):
    """Each rank has a curve of its own loss, if ranks other than 0 have recorded theirs."""
    for name, losses in (("", [3.0, 2.0]), ("_rank1", [3.5, 4.5]), ("_rank2", [3.2, "nan"])):
        records = [{"step": step, "local_loss": loss} for step, loss in enumerate(losses, 1)]
        write_lines(tmp_path / f"training_state{name}.jsonl", records)

    (panel,) = by_rank([read_run(tmp_path)])

    assert panel.name == "rank-losses-0"
    found = [(trace["name"], trace["y"]) for trace in panel.content["traces"]]
    assert found == [("rank 0", [3, 2]), ("rank 1", [3.5, 4.5]), ("rank 2", [3.2, None])]
    assert panel.content["traces"][2]["bad"] == [2]


def test_layer_by_rank(run):
    """The ranks of a step are side by side; the curves are the norms of all groups together."""
    by_layer, totals = by_rank([run])

    last = by_layer.content["maps"][-1]
    assert (last["name"], last["x"]) == ("40", ["rank 0", "rank 1"])
    assert values(last)[2] == pytest.approx([3 / 40, 6 / 40], rel=2e-3)
    one, two = totals.content["traces"]
    assert (one["name"], two["name"]) == ("rank 0", "rank 1")
    assert one["y"][9] == pytest.approx(math.sqrt(1 + 4 + 9) / 10, rel=1e-4)
    assert two["y"][9] == pytest.approx(2 * one["y"][9], rel=1e-4)
    assert one["bad"] == [20]


def test_a_long_run_has_few_positions_of_the_slider(tmp_path):
    """At most 61 steps can be chosen, the last one among them."""
    run = read_run(write_run(tmp_path, num_steps=500, num_ranks=2))

    names = [each["name"] for each in by_rank([run])[0].content["maps"]]
    assert len(names) <= 61
    assert names[-1] == "500"


def test_runs_without_several_ranks(tmp_path):
    """A run on one rank has no map by rank, and a run without norms has no map at all."""
    one = read_run(write_run(tmp_path / "one"))
    write_lines(tmp_path / "none" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    none = read_run(tmp_path / "none")

    assert by_rank([one, none]) == []
    assert norms_by_step([none]).is_empty


def test_families(tmp_path):
    """Update ratios and logits have a map each; other families share one; few members have none."""
    numbers = {f"update_ratio/layers.{i}.weight": 10.0**-i for i in range(2)}
    numbers |= {f"adam_m_norm/layers.{i}.weight": 1.0 for i in range(4)}
    numbers |= {f"learning_rate/group_{i}": 1.0 for i in range(4)}
    numbers |= {"weight_eigenvalue/layers.0": 1.0}
    for i in range(2):
        logits = {"head_0": 3.0, "head_1": 5.0, "mean": 4.0, "max": 5.0 + i}
        numbers |= {f"max_attention_logit/layers.{i}/{end}": v for end, v in logits.items()}
    write_lines(tmp_path / "training_state.jsonl", [{"step": s, **numbers} for s in (5, 10)])
    run = read_run(tmp_path)

    panels = {panel.name: panel.content["maps"] for panel in maps_by_layer([run])}
    assert list(panels) == ["update_ratio", "max_attention_logit", "layers"]
    (ratios,) = panels["update_ratio"]
    assert ratios["rows"] == ["layers.0.weight", "layers.1.weight"]
    assert values(ratios) == pytest.approx(np.array([[1.0, 1.0], [0.1, 0.1]]))
    (logits,) = panels["max_attention_logit"]
    assert logits["rows"] == ["layers.0", "layers.1"]
    assert values(logits)[:, 0] == pytest.approx([5.0, 6.0], rel=2e-3)
    assert [each["name"] for each in panels["layers"]] == ["adam_m_norm"]
    shown = {name for family in families_of(run).values() for name in family}
    assert not shown & {"weight_eigenvalue/layers.0", "learning_rate/group_0"}
