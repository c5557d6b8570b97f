"""Batches and results of captured steps stay where they are."""

import pytest
import torch

from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.step.calls import NetworkCall
from mfwrap.step.static_memory import StaticBatch, StaticResults

CPU = torch.device("cpu")


def calls(*numbers, **keywords):
    """Return a call for each number, with tensors that are filled with it."""
    return [
        NetworkCall((torch.full((2, 3), float(n)),), {"mask": [torch.full((2,), n)], **keywords})
        for n in numbers
    ]


def test_each_batch_is_copied_into_the_same_tensors():
    """Nested tensors are copied; numbers, strings and None stay."""
    batch = StaticBatch(calls(0, 0, mode="sum", weights=None), CPU)
    held = [call.arguments[0] for call in batch.calls]

    batch.load(calls(1, 2, mode="sum", weights=None))

    assert [tensor.unique().tolist() for tensor in held] == [[1], [2]]
    assert [call.keywords["mask"][0].tolist() for call in batch.calls] == [[1, 1], [2, 2]]
    assert batch.calls[0].keywords["mode"] == "sum"
    assert batch.calls[1].keywords["weights"] is None


def test_a_callers_tensor_is_not_kept():
    """A caller may change its batch after the copy."""
    given = calls(1)
    batch = StaticBatch(given, CPU)
    batch.load(given)
    given[0].arguments[0].fill_(9)

    assert batch.calls[0].arguments[0].unique() == 1


def test_a_batch_of_views_is_copied():
    """Rows that are expanded, which have one memory, are copied one by one."""
    given = [NetworkCall((torch.ones(1, 3).expand(2, 3),), {})]
    batch = StaticBatch(given, CPU)
    batch.load([NetworkCall((torch.arange(6.0).reshape(2, 3),), {})])

    assert batch.calls[0].arguments[0].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("first", "error", "match"),
    [
        ([NetworkCall((object(),), {})], TypeError, r"got <object.*at \[0\].arguments\[0\]"),
        (
            [NetworkCall((), {"x": torch.zeros(1, device="meta")})],
            ValueError,
            r"on cpu .* a tensor on meta at \[0\].keywords\['x'\]",
        ),
    ],
)
def test_what_no_graph_can_hold_is_refused(first, error, match):
    """Objects, and tensors of another device, are refused with their place."""
    with pytest.raises(error, match=match):
        StaticBatch(first, CPU)


def test_the_same_numbers_of_another_type_are_refused():
    """True is not 1 for a network."""
    batch = StaticBatch([NetworkCall((1,), {})], CPU)

    with pytest.raises(ValueError, match="got True of type bool instead of 1 of type int"):
        batch.load([NetworkCall((True,), {})])


def report(value, output):
    """Return a report whose numbers follow from a value."""
    number = torch.tensor(float(value))
    count = torch.tensor(value)
    return StepReport(
        output=output,
        skipped=torch.zeros((), dtype=torch.bool),
        applied_updates=count,
        skipped_updates=count + 1,
        consecutive_skips=count + 2,
        learning_rates=torch.tensor([number, number + 1]),
        local_norm_names=("a", "b"),
        losses={"lm_loss": number + 2},
        spike_score=number + 3,
    )


@pytest.mark.parametrize("local_norm", [False, True])
def test_results_are_copies_of_the_reports(local_norm):
    """The copy has the report's fields, and does not change when the next report is held."""
    results = StaticResults()
    copies = []
    for value in (5, 6):
        number = torch.tensor(float(value))
        output = StepOutput(number, torch.ones((), dtype=torch.bool), number * 2, number * 3, None)
        if local_norm:
            output = LocalNormStepOutput(
                *output, torch.tensor([number, 1.0]), torch.tensor([value, 2])
            )
        results.hold(report(value, output), torch.tensor([number, 7.0]))
        copies.append(results.copied())

    for value, (copied, norms) in zip((5, 6), copies, strict=True):
        assert norms.tolist() == [value, 7]
        assert type(copied.output) is (LocalNormStepOutput if local_norm else StepOutput)
        assert [copied.output.loss, copied.output.loss_scale] == [value, 2 * value]
        assert copied.output.global_norm is None
        assert copied.output.overflow.item() is True
        assert copied.skipped.item() is False
        assert copied.learning_rates.tolist() == [value, value + 1]
        assert (copied.applied_updates, copied.consecutive_skips) == (value, value + 2)
        assert copied.applied_updates.dtype == torch.int64
        assert copied.losses == {"lm_loss": value + 2}
        assert (copied.spike_score, copied.reduction_norms) == (value + 3, None)
        assert copied.local_norm_names == ("a", "b")
        if local_norm:
            assert copied.output.size.tolist() == [value, 2]
