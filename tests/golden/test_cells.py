"""The training cells reproduce runs recorded from MindSpore and MindFormers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell, TrainOneStepWithLossScaleCell
from mfwrap.step.skipping import SkippableOptimizer
from support.golden.replays import FAR_SCALES, LOSS_SCALE, MF, PLAIN, Replay, replays, run_of
from support.golden.traces import TOLERANCE, assert_same, cases, parametrized, tensor

with_loss_scale = pytest.mark.parametrize(
    ("family", "name", "fused"), replays(LOSS_SCALE, MF, without=FAR_SCALES)
)
mf_only = pytest.mark.parametrize(("family", "name", "fused"), replays(MF, without=FAR_SCALES))
plain_only = pytest.mark.parametrize(("family", "name", "fused"), replays(PLAIN))
both_ways = pytest.mark.parametrize("fused", [True, False], ids=["fused", "in_place"])


@with_loss_scale
def test_overflow(family, name, fused):
    """Every overflow flag equals the recorded flag."""
    run = run_of(family, name, fused)
    assert_same(run.stacked("overflow"), run.recorded("overflow"))


@with_loss_scale
def test_loss_scale(family, name, fused):
    """Every loss scale equals the recorded loss scale, although it is read after the last step."""
    run = run_of(family, name, fused)
    assert_same(run.stacked("loss_scale"), run.recorded("loss_scale"))


@with_loss_scale
def test_loss(family, name, fused):
    """Every unscaled loss agrees with the recorded loss."""
    run = run_of(family, name, fused)
    assert_same(run.stacked("loss"), run.recorded("loss"), relative=TOLERANCE)


@with_loss_scale
def test_weights(family, name, fused):
    """The weights after every step agree with the recorded weights."""
    run = run_of(family, name, fused)
    assert SkippableOptimizer(run.replay.optimizer).skips_on_device is fused
    run.assert_weights()


@with_loss_scale
def test_live_state(family, name, fused):
    """After each step, the live loss scale and the schedule's position are as recorded.

    The position is read after a flush. The schedule advances by applied updates only.
    """
    replay = Replay(cases(family)[name], fused=fused)
    scales, positions = [], []
    for index in range(replay.case["steps"]):
        replay.step(index)
        scales.append(replay.cell.scale_sense.clone())
        replay.cell.flush()
        positions.append(replay.schedule.last_epoch)
    expected = replay.case["expected"]
    assert_same(torch.stack(scales), [step["scale_sense_after"] for step in expected])
    assert_same(positions, [step["global_step"] for step in expected])


@with_loss_scale
def test_output_types(family, name, fused):
    """Outputs have the recorded names, dtypes and shapes, except for the documented differences."""
    run = run_of(family, name, fused)
    signature = run.replay.case["output_signature"]
    for output in run.outputs:
        assert output._fields == tuple(field for field, _, _ in signature)
        for field, dtype, shape in signature:
            value = getattr(output, field)
            actual = None if value is None else (value.dtype, tuple(value.shape))
            assert actual == expected_type(field, dtype, shape), field


def expected_type(field: str, dtype: str | None, shape: Any) -> tuple[Any, ...] | None:
    """Return the dtype and shape of mfwrap's output for a recorded dtype and shape."""
    if dtype is None:
        return None
    if field == "size":
        return (torch.int64, (shape,))
    if field == "local_norm":
        return (torch.float32, tuple(shape))
    return (torch.bool if field == "overflow" else torch.float32, ())


@mf_only
def test_global_norm(family, name, fused):
    """The global norm before clipping is as recorded; without clipping it is None."""
    run = run_of(family, name, fused)
    if run.replay.case["wrapper_args"].get("use_clip_grad"):
        recorded = run.recorded("global_norm")
        assert_same(run.stacked("global_norm"), recorded, relative=TOLERANCE)
    else:
        assert {output.global_norm for output in run.outputs} == {None}


@pytest.mark.parametrize(
    ("family", "name", "fused"),
    [
        values
        for values in replays(MF, without=FAR_SCALES)
        if cases(MF)[values.values[1]]["wrapper_args"].get("local_norm")
    ],
)
def test_local_norm(family, name, fused):
    """Squared local norms agree with the recorded sums of squares; sizes are equal."""
    run = run_of(family, name, fused)
    recorded = run.recorded("local_norm")
    assert_same(run.stacked("local_norm").square(), recorded, relative=TOLERANCE)
    assert_same(run.stacked("size"), run.recorded("size"))


@mf_only
def test_counters(family, name, fused):
    """The count of applied updates equals MindSpore's global step; other steps count as skipped."""
    run = run_of(family, name, fused)
    applied = run.reported("applied_updates")
    assert_same(applied, run.recorded("global_step"))
    steps = torch.arange(1, len(applied) + 1)
    assert torch.equal(run.reported("skipped_updates"), steps - applied)
    assert torch.equal(run.reported("skipped"), applied.diff(prepend=torch.zeros(1)) == 0)


@mf_only
def test_learning_rate(family, name, fused):
    """Every recorded learning rate equals the rate of its parameter group."""
    run = run_of(family, name, fused)
    case = run.replay.case
    parameters = [recorded["name"] for recorded in case["params"]]
    groups = case["optimizer"].get("groups", [{"params": parameters}])
    group_of = {name: i for i, group in enumerate(groups) for name in group["params"]}
    rates = run.reported("learning_rates")
    recorded = run.recorded("learning_rate")
    if isinstance(recorded[0], list):
        assert_same(rates[:, [group_of[name] for name in parameters]], recorded)
    else:
        assert_same(rates[:, group_of[parameters[-1]]], recorded)
    assert torch.equal(run.stacked("learning_rate"), rates[:, 0])


@both_ways
def test_learning_rates_of_all_groups(fused):
    """A group without a schedule of its own follows the optimizer's schedule."""
    run = run_of(MF, "mf_group_lr_dynamic_b", fused)
    schedule = run.replay.case["lr_by_global_step"]
    before = [0, *run.recorded("global_step")[:-1]]
    assert_same(run.reported("learning_rates")[:, 1], [schedule[step] for step in before])


@plain_only
def test_plain_cell(family, name, fused):
    """TrainOneStepCell reproduces its recorded runs, including those with non-finite weights."""
    run = run_of(family, name, fused)
    assert SkippableOptimizer(run.replay.optimizer).skips_on_device is fused
    returns_grad = run.replay.case["wrapper_args"].get("return_grad", False)
    losses = [output[0] if returns_grad else output for output in run.outputs]
    assert_same(torch.stack(losses), run.recorded("loss"), relative=TOLERANCE)
    run.assert_weights()
    assert run.replay.schedule.last_epoch == run.recorded("global_step")[-1]


@both_ways
def test_plain_cell_returns_gradients(fused):
    """With `return_grad`, the cell also returns the gradients by name, multiplied by `sens`."""
    run = run_of(PLAIN, "tos_return_grad_sens", fused)
    for (_, gradients), recorded in zip(run.outputs, run.recorded("grads"), strict=True):
        assert list(gradients) == list(recorded)
        for name, gradient in gradients.items():
            assert_same(gradient, recorded[name], relative=TOLERANCE)


@pytest.mark.parametrize("cell", [TrainOneStepWithLossScaleCell, MFTrainOneStepCell])
@pytest.mark.parametrize("case", parametrized("overflow_status"))
def test_overflow_status(case, cell):
    """`get_overflow_status` is true for a non-finite element, but not for large finite ones."""
    network = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    step = cell(network, optimizer, scale_sense=torch.ones(()))
    gradients = tuple(tensor(recorded) for recorded in case["input"])
    status, gradients = step.start_overflow_check(torch.ones(()), gradients)
    overflow = step.get_overflow_status(status, gradients)
    assert (overflow.dtype, overflow.shape) == (torch.bool, ())
    assert overflow.item() is case[cell.__name__]["overflow"]


class TwoWeights(nn.Module):
    """A network whose output is ``sum(w * x) + 2 * sum(b)``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.b = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum() + 2 * self.b.sum()


@both_ways
def test_clipped_run_by_hand(fused):
    """A run with scale growth, an overflow and clipping to norm 1 gives hand-computed numbers."""
    network = TwoWeights()
    cell = MFTrainOneStepCell(
        network,
        torch.optim.SGD(network.parameters(), lr=0.1, fused=fused),
        use_clip_grad=True,
        max_grad_norm=1.0,
        scale_sense=DynamicLossScaleUpdateCell(8.0, 2, 2),
        local_norm=True,
    )
    inf = float("inf")
    # Columns: x, loss, overflow, scale, global norm, squared local norms, w, applied updates.
    steps = [
        ([1, 2], 11.0, False, 8, 3.0, [5.0, 4.0], [0.9666667, 1.9333334], 1),
        ([1, 2], 10.7, False, 16, 3.0, [5.0, 4.0], [0.9333334, 1.8666668], 2),
        ([1, 2], 10.4, False, 16, 3.0, [5.0, 4.0], [0.9000001, 1.8000002], 3),
        ([inf, 1], inf, True, 8, inf, [inf, 4.0], [0.9000001, 1.8000002], 3),
        ([1, 2], 10.1, False, 8, 3.0, [5.0, 4.0], [0.8666668, 1.7333336], 4),
        ([1, 2], 9.8, False, 16, 3.0, [5.0, 4.0], [0.8333335, 1.666667], 5),
        ([1, 2], 9.5, False, 16, 3.0, [5.0, 4.0], [0.8000002, 1.6000004], 6),
    ]
    for x, loss, overflow, scale, norm, squares, weights, applied in steps:
        output = cell(torch.tensor(x, dtype=torch.float32))
        assert_same(output.loss, loss, relative=TOLERANCE)
        assert output.overflow.item() is overflow
        assert output.loss_scale.item() == scale
        assert_same(output.learning_rate, 0.10000000149011612)
        assert_same(output.global_norm, norm, relative=TOLERANCE)
        assert_same(output.local_norm.square(), squares, relative=TOLERANCE)
        assert output.size.tolist() == [2, 1]
        assert_same(network.w.detach(), weights, relative=TOLERANCE)
        assert cell.last_report.applied_updates.item() == applied


class MaskedWeights(TwoWeights):
    """A network that returns a numerator and a denominator of shape ``(1,)``."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        numerator = ((self.w * x + self.b) * mask).sum()
        return numerator.reshape(1), (mask.sum() + 1e-8).reshape(1)


@both_ways
def test_per_token_run_by_hand(fused):
    """The gradients of a per-token loss are divided by the number of tokens."""
    network = MaskedWeights()
    cell = MFTrainOneStepCell(
        network,
        torch.optim.SGD(network.parameters(), lr=1.0, fused=fused),
        scale_sense=128.0,
        local_norm=True,
        calculate_per_token_loss=True,
    )
    output = cell(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    assert_same(output.loss, 5.5, relative=TOLERANCE)
    assert output.overflow.item() is False
    assert output.loss_scale.item() == 128
    assert output.global_norm is None
    assert_same(output.local_norm.square(), [1.25, 1.0], relative=TOLERANCE)
    assert_same(network.w.detach(), [0.5, 1.0], relative=TOLERANCE)
    assert_same(network.b.detach(), [2.0], relative=TOLERANCE)
