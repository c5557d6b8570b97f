"""How an anomaly is written, and which layer a name belongs to."""

import math

import pytest

from mfwrap.callbacks.culprit.anomaly_log import Anomaly, AnomalyLog, GroupNorm, layer_of
from mfwrap.records.json_lines import read_json_lines


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.10.self_attn.q_proj.weight", "model.layers.10"),
        ("transformer.h.0.mlp.c_fc.bias", "transformer.h.0"),
        ("encoder.block.1.layer.0.weight", "encoder.block.1"),
        ("0.weight", "0"),
        ("model.layers.3", "model.layers.3"),
        ("lm_head.weight", "lm_head"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.embed_tokens", "model.embed_tokens"),
        ("conv1.weight", "conv1"),
        ("weight", "weight"),
        ("scale", "scale"),
    ],
)
def test_layer_of(name, layer):
    """A name up to its first number, else the module that owns the parameter."""
    assert layer_of(name) == layer


GROUP = GroupNorm(name="a.0.weight", rank=1, norm=math.inf, usual_norm=0.5)


@pytest.mark.parametrize(
    ("anomaly", "line"),
    [
        (
            Anomaly(
                step=7,
                kind="gradient_not_finite",
                ranks=(1,),
                layer="a.0",
                gradients=(GROUP,),
                skipped=True,
            ),
            (
                "step 7: gradient not finite in a.0, a.0.weight has norm inf where 0.5 is usual, "
                "rank 1, update skipped"
            ),
        ),
        (
            Anomaly(
                step=8,
                kind="loss_not_finite",
                ranks=(0, 3),
                layer="a.2",
                where="activation",
                name="a.2.mlp",
                micro_batch=1,
                gradients=(GROUP,),
                is_replay_exact=True,
                skipped=False,
            ),
            (
                "step 8: loss not finite in a.2, first in the activation of a.2.mlp, rank 0, 3, "
                "micro-batch 1, update applied"
            ),
        ),
        (
            Anomaly(step=9, kind="spike", ranks=(), layer=None, is_replay_exact=False),
            "step 9: spike, not again in a replay",
        ),
        (
            Anomaly(
                step=9,
                kind="loss_not_finite",
                ranks=(1,),
                layer=None,
                global_norm=0.0,
                skipped=False,
            ),
            (
                "step 9: loss not finite, all gradients finite, so not replayed, rank 1, "
                "update applied"
            ),
        ),
    ],
    ids=["group", "replay", "nothing", "loss alone"],
)
def test_one_line(anomaly, line, tmp_path, caplog):
    """The log has one line of it, the file one record without what is unknown."""
    AnomalyLog(tmp_path, rank=2).write(anomaly)
    (record,) = read_json_lines(tmp_path / "anomalies_rank2.jsonl")

    assert [r.getMessage() for r in caplog.records] == [
        f"{line}; see {tmp_path / 'anomalies_rank2.jsonl'}"
    ]
    assert record == {
        name: value if not isinstance(value, tuple) else list(value)
        for name, value in anomaly.as_record().items()
    } | ({"gradients": [{**record["gradients"][0]}]} if anomaly.gradients else {})
    assert None not in record.values()
    assert record["step"] == anomaly.step


@pytest.mark.parametrize("norm", [None, math.inf, math.nan])
def test_gradients_that_are_not_known_to_be_finite_are_not_said_to_be(norm):
    """Without their norm, too."""
    anomaly = Anomaly(step=9, kind="loss_not_finite", ranks=(1,), layer=None, global_norm=norm)

    assert str(anomaly) == "step 9: loss not finite, rank 1"


def test_without_a_folder(caplog):
    """The log has the line all the same."""
    AnomalyLog(None).write(Anomaly(step=1, kind="spike", ranks=(0,), layer="a"))

    assert [r.getMessage() for r in caplog.records] == ["step 1: spike in a, rank 0"]
