"""Plant composed faults into trainings of many networks, and count what the monitor records."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.faults.architecture import Rows, collated
from support.faults.changes import changed
from support.faults.draws import draw_cases, networks_of
from support.faults.expectation import Expectation, expectation_of
from support.faults.faults import (
    DATA,
    FLOWING,
    KINDS,
    LOSSES,
    Course,
    Fault,
    How,
    Kind,
    Moment,
    What,
    Where,
)
from support.faults.networks import ARCHITECTURES, PlantedNetwork, new_network
from support.faults.runs import drawn_cases, lost_runs, run_case, run_cases, verdict_of, with_length
from support.faults.series import Series
from support.faults.split import (
    JUDGED_ON,
    MAX_READINGS,
    READINGS,
    WRITTEN_ON,
    Reading,
    kinds_of,
)
from support.faults.training import WAYS, Case, train
from support.faults.twin import Class, Comparison, compare
from support.faults.verdicts import Verdict, judge, table
from support.versions import needs

# peft uses `is_gradient_checkpointing`, which transformers has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    # A fault of `dtype float16` is found without the warning, too.
    pytest.mark.filterwarnings("ignore:.optimizer. makes float16 weights NaN"),
]

_VIT = needs("transformers", "5.9", "the names of ViT's layers")

RECORDED = {Class.NOT_FINITE: 1.0, Class.VISIBLE: 0.75}
"""Least share of the faults of a class that are recorded in time."""

RIGHT_CAUSE = {Class.NOT_FINITE: 0.9, Class.VISIBLE: 0.6}
"""Least share of the faults of a class whose records name a right cause, and no wrong one."""

WRONG_CAUSE, WRONG_PLACE, FALSE_ALARMS = 0.04, 0.02, 0.03
"""Largest number of each, as a share of the number of faults."""

EXPECTED = Expectation(
    step=7,
    last_step=10,
    causes=frozenset({"weight_changed"}),
    may_diverge=False,
    places=("layers.1.linear.weight", "head.weight"),
    rank=0,
    micro_batch=1,
    rows=None,
    has_any_row=False,
)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.fast_sample(3)
def test_each_place_of_an_architecture_exists(name: str):
    """A healthy micro-batch has a finite loss, and the names of layers and parts are there."""
    architecture = ARCHITECTURES[name]
    network = new_network(architecture)
    PlantedNetwork(network, architecture, None)
    rows = Rows(architecture, 4)

    loss = network(**collated([rows[number] for number in range(4)])).loss
    loss.backward()

    assert loss.isfinite()
    assert architecture.inputs in rows[0]
    for layer in architecture.layers:
        for part in filter(None, (architecture.query, architecture.router)):
            network.get_submodule(f"{layer}.{part}")
        if architecture.buffer is not None:
            network.get_buffer(f"{layer}.{architecture.buffer}")
        weights = list(network.get_submodule(layer).parameters())
        assert any(weight.grad is not None for weight in weights)
    if architecture.head is not None:
        network.get_submodule(architecture.head)


def _case(kind: Kind, **fields: Any) -> Case:
    """Return a short case with an early fault, on the first network that can have it."""
    fault = Fault(**{"kind": kind, "step": 4, "num_steps": 1, "where": Where.TENSOR} | fields)
    if kind.course is not Course.BRIEF:
        fault = replace(fault, num_steps=100)
    name = networks_of(kind, unseen=False)[0]
    return Case(architecture=name, way="cell", num_steps=6, fault=fault)


def _series(case: Case, folder: Path) -> dict[str, np.ndarray]:
    series = Series()
    train(case, folder, series)
    return series.stacked()


def _check_that_a_fault_is_the_only_difference(case: Case, folder: Path) -> None:
    run, twin = _series(case, folder / "run"), _series(replace(case, fault=None), folder / "twin")

    assert case.fault is not None
    before = case.fault.step - 1
    assert len(run["loss"]) == len(twin["loss"]) == case.num_steps
    for name in ("loss", "local_norm", "weight_norm"):
        assert np.array_equal(run[name][:before], twin[name][:before])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", Moment)
@pytest.mark.fast_sample(2)
def test_a_fault_is_the_only_difference_in_each_way(way: str, moment: Moment, tmp_path: Path):
    """The run is bit-identical to its twin up to the fault, and differs in the step after it."""
    fault = Fault(kind=Kind(What.WEIGHT, How.ZERO, Course.BRIEF), step=4, moment=moment)
    case = Case(architecture="regression", way=way, num_steps=6, fault=fault)

    _check_that_a_fault_is_the_only_difference(case, tmp_path)

    run, twin = _series(case, tmp_path / "a"), _series(replace(case, fault=None), tmp_path / "b")
    assert (run["weight_norm"][-1] != twin["weight_norm"][-1]).any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.fast_sample(2)
def test_each_kind_is_the_only_difference(kind: Kind, tmp_path: Path):
    """Each kind of fault can be planted, and the run before it is that of its twin."""
    (case,) = draw_cases([kind], seed=1, number=1, unseen=str(kind) in JUDGED_ON)
    assert case.fault is not None
    step = min(case.fault.step, 4)
    case = replace(case, num_steps=7, fault=replace(case.fault, step=step))

    _check_that_a_fault_is_the_only_difference(case, tmp_path)


def test_the_ways_train_alike(tmp_path: Path):
    """The same case has the same weights, up to rounding, in each way of training."""
    first, *others = (
        train(Case(architecture="regression", way=way, num_steps=3), tmp_path / way).state_dict()
        for way in WAYS
    )

    for other in others:
        for name, weight in first.items():
            torch.testing.assert_close(weight, other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (How.RAISED, [[10.0, -20.0], [30.0, 40.0]]),
        (How.LOWERED, [[0.1, -0.2], [0.3, 0.4]]),
        (How.ZERO, [[0.0, 0.0], [0.0, 0.0]]),
        (How.NEGATED, [[-1.0, 2.0], [-3.0, -4.0]]),
        (How.PERMUTED, [[3.0, 4.0], [1.0, -2.0]]),
        (How.CLAMPED, [[0.4, -0.4], [0.4, 0.4]]),
        (How.SHIFTED, [[11.0, 8.0], [13.0, 14.0]]),
        (How.TRANSPOSED, [[1.0, 3.0], [-2.0, 4.0]]),
        (How.REORDERED, [[-2.0, 1.0], [4.0, 3.0]]),
        (How.TRUNCATED, [[1.0, 0.0], [3.0, 0.0]]),
        (How.REPEATED, [[1.0, -2.0], [1.0, -2.0]]),
        (How.MIXED, [[2.0, 1.0], [2.0, 1.0]]),
        (How.PROBABILITIES, [[0.9525741, 0.0474259], [0.2689414, 0.7310586]]),
        (How.LOGARITHMS, [[0.0, -torch.inf], [-1.2039728, -0.3566750]]),
        (How.FLOAT8, [[1.015625, -2.03125], [3.125, 4.0625]]),
    ],
)
def test_a_tensor_is_changed(how: How, expected: list[list[float]]):
    """Each way to change a tensor changes all of it."""
    tensor = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    fault = Fault(kind=Kind(What.WEIGHT, how, Course.BRIEF), step=3, size=10.0)

    torch.testing.assert_close(changed(tensor, fault, 10.0), torch.tensor(expected))


@pytest.mark.parametrize(
    ("where", "marks", "expected"),
    [
        (Where.ELEMENT, None, [[1.0, -2.0], [0.0, 4.0]]),
        (Where.ROW, None, [[1.0, -2.0], [0.0, 0.0]]),
        (Where.TENSOR, [3, 0], [[0.0, 0.0], [3.0, 4.0]]),
        (Where.ELEMENT, [3, 0], [[1.0, -2.0], [3.0, 4.0]]),
    ],
)
def test_a_place_of_a_tensor_is_changed(where: Where, marks: Any, expected: list[list[float]]):
    """A fault changes its place alone, in the rows that are marked."""
    tensor = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    kind = Kind(What.ACTIVATION, How.ZERO, Course.BRIEF)
    fault = Fault(kind=kind, step=3, where=where, pick=1)
    rows = None if marks is None else torch.tensor(marks)

    torch.testing.assert_close(changed(tensor, fault, 10.0, rows), torch.tensor(expected))


def test_a_bit_is_flipped():
    """The lowest bit of the exponent of the second largest element doubles or halves it."""
    kind = Kind(What.WEIGHT, How.BIT, Course.BRIEF)
    fault = Fault(kind=kind, step=3, where=Where.ELEMENT, pick=0)

    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.tensor([1.0, 3.0, 8.0], dtype=dtype)
        assert changed(tensor, fault, 1.0).tolist() in ([1.0, 1.5, 8.0], [1.0, 6.0, 8.0])


@_VIT
@needs("peft", "0.20", "it sees that saved weights are not tied")
def test_each_kind_has_a_cause_and_a_window():
    """Every kind has a network that can have it, causes, places that exist, and steps in time."""
    for kind in KINDS:
        (case,) = draw_cases([kind], seed=0, number=1, unseen=str(kind) in JUDGED_ON)
        architecture = ARCHITECTURES[case.architecture]
        assert case.fault is not None
        network = new_network(architecture)
        expected = expectation_of(case.fault, architecture, network)
        tensors = (network.named_parameters(remove_duplicate=False), network.named_buffers())
        names = {name for name, _ in (*network.named_modules(), *tensors[0], *tensors[1])}
        assert names >= set(expected.places)
        assert expected.causes
        assert expected.last_step > expected.step == case.fault.step
        assert expected.causes.isdisjoint({"unknown", "transient", "diverged"})


def test_faults_are_of_the_place_they_are_drawn_for():
    """Only what a micro-batch holds or makes has a micro-batch and a row; each rank has faults."""
    cases = draw_cases(KINDS, seed=3, number=3 * len(KINDS), num_ranks=2)
    faults = [case.fault for case in cases if case.fault is not None]

    assert {fault.rank for fault in faults} == {None, 0, 1}
    assert {fault.where for fault in faults} == set(Where)
    assert {fault.moment for fault in faults} == set(Moment)
    assert {case.way for case in cases} == set(WAYS)
    assert 0.4 < sum(fault.step <= 20 for fault in faults) / len(faults) < 0.65
    for fault in faults:
        if fault.micro_batch is not None:
            assert fault.kind.what in FLOWING | LOSSES | DATA
        if fault.row is not None:
            assert fault.micro_batch is not None
    assert draw_cases(KINDS, seed=3, number=5) == draw_cases(KINDS, seed=3, number=5)


def test_the_halves_have_each_kind_once():
    """Each kind is in one half."""
    assert Counter(WRITTEN_ON) + Counter(JUDGED_ON) == Counter(map(str, KINDS))


@_VIT
def test_the_judged_half_must_be_asked_for():
    """Without asking, no judged kind is drawn; after its last reading, it is refused."""
    reading = Reading(date="2000-01-01", commit="0", seeds=(0,), score="")

    for case in drawn_cases(0, len(WRITTEN_ON)):
        assert case.fault is not None
        assert str(case.fault.kind) in WRITTEN_ON
    assert {str(kind) for kind in kinds_of(judged=True, readings=())} == set(JUDGED_ON)
    with pytest.raises(PermissionError, match=f"may be read {MAX_READINGS} times"):
        kinds_of(judged=True, readings=[reading] * MAX_READINGS)
    assert len(READINGS) <= MAX_READINGS


def test_unseen_networks_are_apart():
    """Kinds of the judged half are planted into unseen networks alone, the others into the rest."""
    for kind in KINDS:
        is_judged = str(kind) in JUDGED_ON
        names = networks_of(kind, unseen=is_judged)
        assert {ARCHITECTURES[name].is_unseen for name in names} == {is_judged}


@pytest.mark.parametrize(
    ("said", "right", "wrong_causes", "wrong_places"),
    [
        (
            {
                "step": 7,
                "cause": "weight_changed",
                "layer": "layers.1",
                "ranks": [0],
                "micro_batch": 1,
            },
            True,
            (),
            (),
        ),
        ({"step": 8, "cause": "weight_changed", "layer": "head"}, True, (), ()),
        ({"step": 8, "cause": ["data", "weight_changed"]}, True, (), ()),
        (
            {"step": 7, "layer": "layers.2", "ranks": [1], "micro_batch": 0},
            False,
            (),
            ("layer", "micro_batch", "ranks"),
        ),
        ({"step": 7, "layer": "layers.10"}, False, (), ("layer",)),
        ({"step": 7, "cause": "data", "rows": [1]}, False, ("data",), ("rows",)),
        ({"step": 11, "cause": "data"}, False, ("data",), ()),
        ({"step": 7, "cause": "diverged"}, False, ("diverged",), ()),
        ({"step": 7, "cause": "unknown"}, False, (), ()),
    ],
)
def test_a_record_is_compared_with_what_is_expected(
    said: dict[str, Any],
    *,
    right: bool,
    wrong_causes: Sequence[str],
    wrong_places: Sequence[str],
):
    """What a record leaves out is not wrong; what contradicts the fault is, late or not."""
    verdict = judge("", Class.VISIBLE, EXPECTED, [{"kind": "spike", **said}])

    assert verdict.recorded == (said["step"] <= EXPECTED.last_step)
    assert verdict.right_cause == right
    assert (verdict.wrong_causes, verdict.wrong_places) == (wrong_causes, wrong_places)


def test_a_fault_without_a_layer_has_no_layer_in_its_record():
    """To blame a layer, or a row, for what is in all of them is wrong."""
    everywhere = replace(EXPECTED, places=(), rank=None, micro_batch=None)
    said = {"step": 7, "kind": "spike", "layer": "layers.1", "ranks": [0], "micro_batch": 0}

    assert judge("", Class.WEAK, everywhere, [said]).wrong_places == ("layer",)


def test_rows_are_compared_with_samples():
    """The samples of a record are the rows that it blames, if the fault is in a row."""
    in_row = replace(EXPECTED, rows=(2,))
    said = {"step": 7, "kind": "spike", "samples": [{"micro_batch": 1, "row": 2}]}
    other = {"step": 7, "kind": "spike", "samples": [{"micro_batch": 1, "row": 3}]}

    assert judge("", Class.WEAK, in_row, [said]).wrong_places == ()
    assert judge("", Class.WEAK, in_row, [other]).wrong_places == ("rows",)
    assert judge("", Class.WEAK, EXPECTED, [other]).wrong_places == ()


def test_a_divergence_is_right_only_if_there_is_one():
    """`diverged` leads to a fault that lasts, if the loss has left its course for good."""
    said = [{"step": 7, "kind": "loss_spike", "cause": "diverged"}]
    lasting = replace(EXPECTED, may_diverge=True)

    assert judge("", Class.VISIBLE, lasting, said, has_diverged=True).right_cause
    assert not judge("", Class.VISIBLE, lasting, said).right_cause
    brief = judge("", Class.VISIBLE, EXPECTED, said, has_diverged=True)
    assert (brief.right_cause, brief.wrong_causes) == (False, ())


def test_what_the_twin_records_is_no_record_of_the_fault():
    """An episode before the fault, or in the twin, is a false alarm."""
    before = {"step": 6, "kind": "spike"}
    of_both = {"step": 8, "kind": "loss_spike", "cause": "weight_changed"}
    end = {**before, "last_step": 6}
    verdict = judge("", Class.WEAK, EXPECTED, [before, end, of_both], [before, end, of_both])

    assert not verdict.recorded
    assert (verdict.false_alarms, verdict.twin_alarms) == (1, 2)


def _numbers(**changes: dict[int, float]) -> dict[str, np.ndarray]:
    """Return the series of 30 steps with two layers, with changes at some steps."""
    dice = np.random.default_rng(0)
    steps = {
        "loss": 3.0 + 0.1 * dice.normal(size=30),
        "local_norm": np.exp(0.1 * dice.normal(size=(30, 2))),
        "weight_norm": np.ones((30, 2)),
    }
    for name, values in changes.items():
        for step, value in values.items():
            steps[name][step - 1] = value
    return steps


@pytest.mark.parametrize(
    ("changes", "class_", "has_diverged"),
    [
        ({}, Class.WITHOUT_EFFECT, False),
        ({"weight_norm": {20: 1.1}}, Class.WEAK, False),
        ({"loss": {20: 3.3}}, Class.WEAK, False),
        ({"loss": {20: 9.0}}, Class.VISIBLE, False),
        ({"loss": dict.fromkeys(range(20, 31), 9.0)}, Class.VISIBLE, True),
        ({"local_norm": {20: 0.0}}, Class.VISIBLE, False),
        ({"loss": {20: np.nan}}, Class.NOT_FINITE, False),
        ({"loss": {3: 9.0}}, Class.WITHOUT_EFFECT, False),
    ],
)
def test_a_run_is_compared_with_its_twin(
    changes: dict[str, dict[int, float]], class_: Class, *, has_diverged: bool
):
    """The class follows from the numbers of both, from the step of the fault on."""
    comparison = compare([_numbers(**changes)], [_numbers()], [0, 1], first=15, last=30)

    assert isinstance(comparison, Comparison)
    assert (comparison.class_, comparison.has_diverged) == (class_, has_diverged)


@pytest.mark.parametrize(
    "case",
    [
        _case(Kind(What.WEIGHT, How.NAN, Course.BRIEF)),
        _case(
            Kind(What.SECOND_MOMENT, How.LOWERED, Course.BRIEF), size=1e6, where=Where.ALL, step=15
        ),
        pytest.param(
            _case(Kind(What.INPUTS, How.NAN, Course.BRIEF), where=Where.ALL, micro_batch=1, row=2),
            marks=_VIT,
        ),
        _case(Kind(What.LOSS, How.RAISED, Course.LASTING), size=1e3, where=Where.ALL, step=15),
    ],
    ids=lambda case: str(case.fault.kind),
)
@pytest.mark.fast_sample(2)
def test_a_fault_is_recorded_with_its_cause(case: Case, tmp_path: Path):
    """Faults that leave no doubt are recorded in time, and led to."""
    result = run_case(with_length(case), tmp_path)

    assert result.verdict.right_cause, result
    assert result.verdict.wrong_places == ()
    assert result.verdict.false_alarms == 0


def _logged(results: Iterable[dict[str, Any]]) -> list[Verdict]:
    """Log the table (see it with ``--log-cli-level=INFO``), and return the verdicts."""
    verdicts = [verdict_of(result) for result in results]
    logging.getLogger(__name__).info("\n%s", table(verdicts))
    assert not [one.lost for one in verdicts if one.lost]
    return verdicts


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_campaign_on_one_rank():
    """Three faults of each kind of the written half fare no worse than docs/tests.md says."""
    verdicts = _logged(run_cases(drawn_cases(0, 3 * len(WRITTEN_ON))))

    counts = table(verdicts)
    for class_, recorded in RECORDED.items():
        group = [one for one in verdicts if one.class_ == class_]
        assert sum(one.recorded for one in group) >= recorded * len(group), counts
        assert sum(one.right_cause for one in group) >= RIGHT_CAUSE[class_] * len(group), counts
    number = len(verdicts)
    assert sum(bool(one.wrong_causes) for one in verdicts) <= WRONG_CAUSE * number, counts
    assert sum(bool(one.wrong_places) for one in verdicts) <= WRONG_PLACE * number, counts
    assert sum(one.twin_alarms for one in verdicts) <= FALSE_ALARMS * number, counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_campaign_on_two_ranks():
    """Of faults of the written half on two ranks, whose number sets no goals, none is lost."""
    assert _logged(run_cases(drawn_cases(1, 20, num_ranks=2), num_ranks=2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_fault_of_one_rank_loses_the_run(num_ranks: int):
    """Each kind of fault on one rank leaves a training that goes on to its end on all of them."""
    cases = []
    for number, kind in enumerate(KINDS):
        (case,) = draw_cases([kind], seed=number, number=1, num_ranks=num_ranks)
        assert case.fault is not None
        # All ranks have the same types.
        rank = None if kind.how is How.FLOAT16 else number % num_ranks
        fault = replace(case.fault, step=min(case.fault.step, 6), rank=rank)
        cases.append(replace(case, fault=fault, num_steps=16))

    assert lost_runs(cases, num_ranks) == {}
