"""An anomaly is written as one line to the log and as one record to a file."""

import dataclasses
import math
import re
from typing import get_args

import pytest

from mfwrap.callbacks.culprit.anomaly_log import (
    KINDS,
    Anomaly,
    AnomalyLog,
    BadRow,
    GroupNorm,
    Kind,
    StateNorm,
)
from mfwrap.records.json_lines import read_json_lines
from support.paths import ROOT

FINITE = "the outputs of all modules of the network are finite, the loss is not"

GROUP = GroupNorm(name="a.0.weight", rank=1, norm=math.inf, usual_norm=0.5)
NEW_GROUP = GroupNorm(name="a.0.weight", rank=1, norm=math.inf, usual_norm=math.nan)
WEIGHT = StateNorm(kind="weight", name="a.1.weight", norm=400.0, norm_before=2.5, rise=160.0)
NAN_WEIGHT = dataclasses.replace(WEIGHT, norm=math.nan, rise=math.inf)

LINES = {
    "group": (
        {"kind": "gradient_not_finite", "gradients": (GROUP,), "skipped": True},
        (
            "step 7: non-finite gradient norm in layer a.0 on rank 1: "
            "gradient norm of a.0.weight is inf (usually 0.5); update skipped"
        ),
    ),
    "first group": (
        {"kind": "gradient_not_finite", "gradients": (NEW_GROUP,)},
        (
            "step 7: non-finite gradient norm in layer a.0 on rank 1: gradient norm of a.0.weight "
            "is inf"
        ),
    ),
    "not reproduced": (
        {
            "kind": "gradient_not_finite",
            "gradients": (GROUP,),
            "is_replay_exact": True,
            "replay": "not_reproduced",
            "replay_detail": "transient",
            "num_clean_replays": 3,
        },
        (
            "step 7: non-finite gradient norm in layer a.0 on rank 1: "
            "gradient norm of a.0.weight is inf (usually 0.5), 3 exact replays did not reproduce "
            "it, one of them with deterministic kernels: code that depends on anything else, or "
            "the hardware"
        ),
    ),
    "not reproduced, later weights": (
        {
            "kind": "gradient_not_finite",
            "layer": None,
            "is_replay_exact": False,
            "replay": "not_reproduced",
            "replay_detail": "later weights",
        },
        (
            "step 7: non-finite gradient norm on rank 1: a replay with later weights did not "
            "reproduce it"
        ),
    ),
    "activation": (
        {
            "kind": "loss_not_finite",
            "ranks": (0, 3),
            "where": "activation",
            "name": "a.0.mlp",
            "micro_batch": 1,
            "gradients": (GROUP,),
            "is_replay_exact": True,
            "skipped": True,
        },
        (
            "step 7: non-finite loss in layer a.0 on ranks 0, 3, micro-batch 1: "
            "the first non-finite output is that of a.0.mlp; update skipped"
        ),
    ),
    "buffers": (
        {
            "kind": "gradient_not_finite",
            "layer": None,
            "buffers": ("norm.running_mean", "norm.running_var"),
            "skipped": True,
        },
        (
            "step 7: non-finite gradient norm on rank 1: buffers norm.running_mean, "
            "norm.running_var became non-finite; update skipped"
        ),
    ),
    "later weights": (
        {
            "kind": "gradient_not_finite",
            "where": "gradient",
            "name": "a.0.mlp",
            "micro_batch": 0,
            "is_replay_exact": False,
            "replay": "reproduced",
        },
        (
            "step 7: non-finite gradient norm in layer a.0 on rank 1, micro-batch 0: "
            "the first non-finite gradient is that of a.0.mlp, found by a replay with later weights"
        ),
    ),
    "not covered": (
        {
            "kind": "loss_not_finite",
            "layer": None,
            "is_replay_exact": True,
            "replay": "not_covered",
            "replay_detail": "the loss is computed outside of the network",
        },
        (
            "step 7: non-finite loss on rank 1: a replay was finite but does not cover the whole "
            "step: the loss is computed outside of the network"
        ),
    ),
    "not covered, and explained": (
        {
            "kind": "loss_not_finite",
            "layer": None,
            "explanation": "the fault is outside of the network: the loss is computed there",
            "is_replay_exact": True,
            "replay": "not_covered",
            "replay_detail": "the loss is computed there",
        },
        (
            "step 7: non-finite loss on rank 1: the fault is outside of the network: the loss is "
            "computed there, a replay was finite but does not cover the whole step"
        ),
    ),
    "replay failed": (
        {
            "kind": "loss_not_finite",
            "layer": None,
            "is_replay_exact": True,
            "replay": "failed",
            "replay_detail": "out of memory: tried to allocate 2 GiB",
        },
        (
            "step 7: non-finite loss on rank 1: the replay failed: out of memory: tried to "
            "allocate 2 GiB"
        ),
    ),
    "second replay": (
        {
            "kind": "gradient_not_finite",
            "where": "gradient",
            "name": "a.0.mlp",
            "is_replay_exact": True,
            "replay": "reproduced",
            "replay_detail": "only by the second of two replays",
        },
        (
            "step 7: non-finite gradient norm in layer a.0 on rank 1: the first non-finite "
            "gradient is that of a.0.mlp, found only by the second of two replays"
        ),
    ),
    "no targets": (
        {"kind": "loss_not_finite", "layer": None, "where": "targets", "name": "labels"},
        (
            "step 7: non-finite loss on rank 1: the micro-batch has no targets, all of `labels` is "
            "ignored"
        ),
    ),
    "all weights": (
        {"kind": "loss_not_finite", "layer": None, "where": "weights", "name": ""},
        ("step 7: non-finite loss on rank 1: most weights were non-finite before the step"),
    ),
    "input": (
        {
            "kind": "loss_not_finite",
            "layer": None,
            "where": "input",
            "name": "pixel_values",
            "micro_batch": 0,
            "rows": (2,),
            "is_replay_exact": True,
        },
        (
            "step 7: non-finite loss on rank 1, micro-batch 0: "
            "input `pixel_values` is non-finite in row 2"
        ),
    ),
    "input without rows": (
        {"kind": "loss_not_finite", "layer": None, "where": "input", "name": "scale"},
        "step 7: non-finite loss on rank 1: input `scale` is non-finite",
    ),
    "two rows": (
        {"kind": "loss_not_finite", "layer": None, "where": "input", "name": "x", "rows": (0, 4)},
        "step 7: non-finite loss on rank 1: input `x` is non-finite in rows 0, 4",
    ),
    "loss": (
        {"kind": "loss_not_finite", "layer": None, "where": "loss", "name": ""},
        f"step 7: non-finite loss on rank 1: {FINITE}",
    ),
    "weight": (
        {"kind": "loss_not_finite", "where": "weight", "name": "a.0.bias"},
        "step 7: non-finite loss in layer a.0 on rank 1: a.0.bias has non-finite elements",
    ),
    "weight that is NaN": (
        {
            "kind": "loss_not_finite",
            "where": "weight",
            "name": "a.1.weight",
            "weights": (NAN_WEIGHT,),
        },
        "step 7: non-finite loss in layer a.0 on rank 1: a.1.weight has non-finite elements",
    ),
    "weight that has risen": (
        {
            "kind": "spike",
            "layer": "a.1",
            "where": "weight",
            "name": "a.1.weight",
            "weights": (WEIGHT,),
            "global_norm": 500.0,
            "usual_global_norm": 2.0,
            "skipped": False,
        },
        (
            "step 7: gradient norm spike in layer a.1 on rank 1: "
            "global norm is 500 (usually 2), norm of a.1.weight rose from 2.5 to 400; "
            "update applied"
        ),
    ),
    "weight that has changed without a rise": (
        {
            "kind": "update_spike",
            "cause": "weight_changed",
            "where": "weight",
            "name": "a.0.bias",
            "explanation": "a.0.bias changed between two steps",
        },
        "step 7: update too large in layer a.0 on rank 1: a.0.bias changed between two steps",
    ),
    "learning rate that is too high": (
        {
            "kind": "update_spike",
            "layer": None,
            "cause": "learning_rate",
            "explanation": "the update of step 6 changed the weights by 30 times their size",
            "suggestion": "lower the learning rate, or warm it up over more steps",
            "skipped": False,
        },
        (
            "step 7: update too large on rank 1: the update of step 6 changed the weights by 30 "
            "times their size; lower the learning rate, or warm it up over more steps; update "
            "applied"
        ),
    ),
    "weight that has changed before an overflow": (
        {
            "kind": "gradient_not_finite",
            "cause": "weight_changed",
            "where": "weight",
            "name": "a.0.bias",
            "explanation": "a.0.bias changed between two steps",
        },
        (
            "step 7: non-finite gradient norm in layer a.0 on rank 1: a.0.bias changed between two "
            "steps"
        ),
    ),
    "loss alone": (
        {"kind": "loss_not_finite", "layer": None, "global_norm": 0.0, "skipped": False},
        (
            "step 7: non-finite loss on rank 1: "
            "all gradients are finite, a replay is not possible after the update; update applied"
        ),
    ),
    "loss without a cause": (
        {"kind": "loss_spike", "layer": None, "losses": (2.0, 8.4), "usual_loss": 2.8},
        "step 7: loss spike on rank 1: the loss is 8.4 (usually 2.8)",
    ),
    "loss that one rank has found alone": (
        {"kind": "loss_drop", "layer": None, "losses": (2.0,), "usual_loss": 2.8},
        "step 7: loss far too low on rank 1",
    ),
    "cause in no layer": (
        {
            "kind": "loss_spike",
            "layer": None,
            "explanation": "the loss rose to 8.4 (usually 2.8) on the data of this step",
            "gradients": (GROUP,),
            "skipped": False,
        },
        (
            "step 7: loss spike on rank 1: the loss rose to 8.4 (usually 2.8) on the data of this "
            "step; update applied"
        ),
    ),
    "cause in a layer": (
        {
            "kind": "local_norm_spike",
            "explanation": "only the gradients of a.0 have risen, the loss has not",
            "gradients": (GROUP,),
        },
        (
            "step 7: gradient norm spike in layer a.0 on rank 1: only the gradients of "
            "a.0 have risen, the loss has not, gradient norm of a.0.weight is inf (usually 0.5)"
        ),
    ),
    "steps that show it together": (
        {"kind": "norm_shift", "layer": None, "since": 4},
        "step 7: gradient norms of another size on rank 1; it shows from step 4 on",
    ),
    "looked at every few steps": (
        {"kind": "state_spike", "layer": None, "since": 1},
        "step 7: training state changed on rank 1; it began in step 1 at the earliest",
    ),
    "nothing known": (
        {"kind": "spike", "ranks": (), "layer": None},
        "step 7: gradient norm spike",
    ),
    "one weight differs": (
        {"kind": "replicas_differ", "where": "weight", "name": "a.0.bias", "num_groups": 1},
        "step 7: replicas differ in layer a.0 on rank 1: a.0.bias differs",
    ),
    "gradients differ": (
        {"kind": "replicas_differ", "where": "gradient", "name": "a.0.bias", "num_groups": 3},
        (
            "step 7: replicas differ in layer a.0 on rank 1: "
            "the gradient of a.0.bias is the first of 3 tensors that differ"
        ),
    ),
}


def test_each_kind_has_a_name_in_the_log():
    """No kind is without a name, and no name without a kind."""
    assert get_args(Kind) == tuple(KINDS)


@pytest.mark.parametrize(("fields", "line"), LINES.values(), ids=LINES)
def test_one_line(fields, line, tmp_path, caplog):
    """The log gets one line; the file gets one record, in which unknown fields are left out."""
    anomaly = Anomaly(**{"step": 7, "ranks": (1,), "layer": "a.0", **fields})
    AnomalyLog(tmp_path, rank=2).write(anomaly)
    (record,) = read_json_lines(tmp_path / "anomalies_rank2.jsonl")

    assert [r.getMessage() for r in caplog.records] == [
        f"{line}; see {tmp_path / 'anomalies_rank2.jsonl'}"
    ]
    known = {"step", "kind", *(name for name, value in fields.items() if value not in {None, ()})}
    assert known <= record.keys()
    assert not {None, ()} & {v for v in record.values() if not isinstance(v, list)}
    assert record["step"] == 7


@pytest.mark.parametrize("norm", [None, math.inf, math.nan])
def test_gradients_are_called_finite_only_if_their_norm_is(norm):
    """If the global norm is non-finite or unknown, the line does not mention gradients."""
    anomaly = Anomaly(step=9, kind="loss_not_finite", ranks=(1,), layer=None, global_norm=norm)

    assert str(anomaly) == "step 9: non-finite loss on rank 1"


@pytest.mark.parametrize(
    ("explanation", "ending"),
    [("input `x` is non-finite", ""), ("a square root of zero", ", a square root of zero")],
)
def test_nothing_is_said_twice(explanation, ending):
    """An explanation that the cause has said already, with its rows, is left out."""
    anomaly = Anomaly(
        step=3,
        kind="loss_not_finite",
        ranks=(0,),
        layer=None,
        where="input",
        name="x",
        rows=(31,),
        explanation=explanation,
    )

    assert str(anomaly).endswith(f"on rank 0: input `x` is non-finite in row 31{ending}")


def test_without_a_folder(caplog):
    """Without a run folder, the line is logged and no file is named."""
    AnomalyLog(None).write(Anomaly(step=1, kind="spike", ranks=(0,), layer="a"))

    assert [r.getMessage() for r in caplog.records] == [
        "step 1: gradient norm spike in layer a on rank 0"
    ]


def test_the_docs_list_each_kind():
    """The table in docs/how-to/find_a_nan.md has each kind of anomaly once."""
    page = (ROOT / "docs" / "how-to" / "find_a_nan.md").read_text(encoding="utf-8")
    table = page.partition("| kind | what was found |\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)

    assert sorted(kind for row in rows for kind in row.split("`, `")) == sorted(KINDS)


@pytest.mark.parametrize(("number", "said"), [(2, None), (3, "and 1 more row"), (5, "3 more rows")])
def test_rows_that_the_line_leaves_out(number, said):
    """The line names two rows and counts the others, which are all in the record."""
    rows = tuple(BadRow(rank=0, micro_batch=0, row=row) for row in range(number))
    found = Anomaly(step=3, kind="spike", ranks=(), layer=None, samples=rows)

    assert len(found.as_record()["samples"]) == number
    assert "row 1 of micro-batch 0" in str(found)
    assert "row 2 of micro-batch 0" not in str(found)
    assert (said or "") in str(found)
    assert ("more row" in str(found)) is (said is not None)
