"""A captured step does what the plain step does, from memory that stays the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import SGD, Adam, AdamW

from mfwrap import (
    AdamWeightDecay,
    AdaptiveLossScaleUpdateCell,
    ChainedOptimizer,
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
)
from mfwrap.callbacks import RankClock
from mfwrap.collectives import section_clock
from mfwrap.optimizers import Muon
from mfwrap.step.captured import _capturable
from mfwrap.step.pipeline import pipeline_stages
from support.captured_training import numbers, train, training
from support.optimizer_runs import muon_with_adamw
from support.small_networks import Classifier, TokenClassifier, labelled_batches
from support.versions import needs

NAN = float("nan")
OPTIMIZERS = {
    "AdamW": lambda parameters: AdamW(parameters, lr=2.0**-5, fused=True),
    "Adam": lambda parameters: Adam(parameters, lr=2.0**-5, amsgrad=True, fused=True),
    "SGD": lambda parameters: SGD(parameters, lr=2.0**-5, momentum=0.5, fused=True),
    "AdamWeightDecay": lambda parameters: AdamWeightDecay(parameters, lr=2.0**-5),
    "two groups": lambda parameters: AdamW(
        [{"params": [p], "lr": 2.0**-n, "name": f"{n}"} for n, p in enumerate(parameters, start=3)],
        fused=True,
    ),
}
SCALES = {
    "none": lambda: 1.0,
    "dynamic": lambda: DynamicLossScaleUpdateCell(2.0**16, 2, 2),
    "adaptive": lambda: AdaptiveLossScaleUpdateCell(2.0**16, 2, 20),
}


def both(factors, *, seed=1, **settings):
    """Return the numbers of captured and of plain training."""
    trained = [training(capture=capture, **settings) for capture in (True, False)]
    return [numbers(each, train(each, factors, seed=seed)) for each in trained]


@given(
    factors=st.lists(st.sampled_from([1.0, 1.0, 1.0, NAN, 1e3]), min_size=2, max_size=8),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    scale=st.sampled_from(sorted(SCALES)),
    per_token=st.booleans(),
    seed=st.integers(0, 100),
    settings=st.fixed_dictionaries(
        {
            "gradient_accumulation_steps": st.sampled_from([1, 2, 4]),
            "use_clip_grad": st.booleans(),
            "local_norm": st.booleans(),
            "spike_policy": st.sampled_from(["record", "skip", "clip"]),
        }
    ),
)
def test_numbers_are_those_of_the_plain_step(factors, optimizer, scale, per_token, seed, settings):
    """Results, weights, optimizer state, averages and rates are bitwise equal."""
    captured, plain = both(
        factors,
        seed=seed,
        make_optimizer=OPTIMIZERS[optimizer],
        scale_sense=SCALES[scale],
        network=TokenClassifier if per_token else Classifier,
        calculate_per_token_loss=per_token,
        **settings,
    )

    assert captured == pytest.approx(plain, rel=0, abs=0, nan_ok=True)


def test_a_chain_of_optimizers_is_captured():
    """The optimizers of a chain get their rates from the device, too."""

    def chained(parameters):
        first, *others = parameters
        return ChainedOptimizer(
            AdamW([first], lr=2.0**-5, fused=True), SGD(others, lr=2.0**-4, fused=True)
        )

    captured, plain = both([1.0, NAN, 1.0, 1.0], make_optimizer=chained)

    assert captured == pytest.approx(plain, rel=0, abs=0, nan_ok=True)


@needs("torch", "2.10", "Tensor.grad_dtype")
def test_gradients_in_float32_are_captured():
    """Half-precision weights accumulate float32 gradients as in the plain step."""

    class Half(Classifier):
        def __init__(self):
            super().__init__()
            self.bfloat16()

        def forward(self, inputs, labels, loss_factor=1.0):
            return super().forward(inputs.bfloat16(), labels, loss_factor)

    captured, plain = both(
        [1.0, 1.0, 1.0],
        network=Half,
        gradient_accumulation_steps=4,
        accumulate_allreduce_grads_in_fp32=True,
    )

    assert captured == plain


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_training_resumes_bitwise(before, after):
    """A state saved in the middle continues in a captured or a plain cell with equal numbers."""
    settings = {"scale_sense": SCALES["dynamic"], "spike_policy": "clip"}
    unbroken = training(capture=False, **settings)
    train(unbroken, [1.0, NAN, 1.0, 1.0])
    expected = numbers(unbroken, train(unbroken, [1.0, NAN, 1.0], seed=2))

    first = training(capture=before, **settings)
    train(first, [1.0, NAN, 1.0, 1.0])
    state = first.cell.state_dict()
    second = training(capture=after, **settings)
    second.network.load_state_dict(first.network.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.schedule.load_state_dict(first.schedule.state_dict())
    second.cell.load_state_dict(state)
    found = numbers(second, train(second, [1.0, NAN, 1.0], seed=2))

    assert found == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_weights_that_are_unfrozen_later_are_averaged():
    """The averages are those of plain steps, and start before the step that is captured."""

    class HalfFrozen(Classifier):
        def __init__(self):
            super().__init__()
            self.layers[0].requires_grad_(requires_grad=False)

    results = []
    for capture in (False, True):
        trained = training(capture=capture, network=HalfFrozen)
        outputs = train(trained, [1.0] * 3)
        trained.network.layers[0].requires_grad_()
        outputs += train(trained, [1.0, NAN, 1.0], seed=2)
        names = [name for name, _ in trained.cell.ema.named_averages()]
        assert names == [name for name, _ in trained.network.named_parameters()]
        results.append(numbers(trained, outputs))
    assert results[1] == pytest.approx(results[0], rel=0, abs=0, nan_ok=True)


def test_a_saved_state_does_not_change_later():
    """The counters and the window of a saved state keep their values while training goes on."""
    trained = training(capture=True, spike_policy="clip")
    train(trained, [1.0, 1.0])
    state = trained.cell.state_dict()
    saved = {name: state[name].clone() for name in state if isinstance(state[name], torch.Tensor)}
    train(trained, [1.0, 1.0])

    assert all(state[name].equal(value) or value.isnan().any() for name, value in saved.items())
    assert state["applied_updates"] == 2


def test_a_rate_that_a_loop_sets_is_used_at_once():
    """Without a schedule, the next update uses the rate that the loop has set."""
    trained = training(capture=True, make_schedule=None)
    rates = []
    for rate in (2.0**-4, 2.0**-6, 2.0**-6, 2.0**-3):
        trained.optimizer.param_groups[0]["lr"] = rate
        train(trained, [1.0])
        rates.append(trained.cell.last_report.output.learning_rate.item())

    assert rates == [2.0**-4, 2.0**-6, 2.0**-6, 2.0**-3]


def test_a_rate_that_is_a_tensor_stays_the_loops():
    """A rate that is a tensor is used as it is when the update runs."""
    rate = torch.tensor(2.0**-4)
    trained = training(
        capture=True,
        make_schedule=None,
        make_optimizer=lambda parameters: AdamW(parameters, lr=rate, fused=True),
    )
    train(trained, [1.0])
    rate.fill_(2.0**-7)
    train(trained, [1.0])

    assert trained.optimizer.param_groups[0]["lr"] is rate
    assert trained.cell.last_report.output.learning_rate == 2.0**-7


def test_a_rate_that_is_not_finite_changes_nothing():
    """A rate of NaN is refused before the update."""
    trained = training(capture=True, make_schedule=None)
    train(trained, [1.0])
    before = numbers(trained, [])
    trained.optimizer.param_groups[0]["lr"] = NAN

    with pytest.raises(ValueError, match="learning rate of parameter group 0 must be finite"):
        train(trained, [1.0])

    assert numbers(trained, [])[:-1] == before[:-1]


def test_too_many_skips_end_training_one_update_later():
    """The error comes when the update after the last skip is done, and names the groups."""
    trained = training(capture=True, max_consecutive_skips=2, local_norm=True)
    train(trained, [1.0, NAN, NAN])

    with pytest.raises(RuntimeError, match=r"2 updates in a row were skipped.*layers\.0\.weight"):
        train(trained, [1.0])

    assert trained.cell._MFTrainOneStepCell__update.counts.applied_updates == 2


def test_batches_must_have_the_first_ones_shapes():
    """Another shape, form or number is refused in one sentence, and training can go on."""
    trained = training(capture=True)
    ((inputs, labels),) = labelled_batches(1)
    trained.cell(inputs, labels, 1.0)

    with pytest.raises(ValueError, match=r"got shape \(7, 8\).*instead of shape \(8, 8\)"):
        trained.cell(inputs[1:], labels[1:], 1.0)
    with pytest.raises(ValueError, match=r"got 2.0 of type float instead of 1.0"):
        trained.cell(inputs, labels, 2.0)
    with pytest.raises(ValueError, match="form of the first one"):
        trained.cell(inputs, labels)
    trained.cell(inputs, labels, 1.0)

    assert trained.cell.last_report.applied_updates == 2


class Loop(MFTrainOneStepCell):
    """A step that is written by hand."""

    def __call__(self, *inputs):
        return self.network(*inputs)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        (
            {"make_optimizer": lambda parameters: AdamW(parameters, foreach=True)},
            ValueError,
            "whose host reads the skip flag",
        ),
        (
            {"make_optimizer": lambda parameters: muon_with_adamw(Muon, [*parameters])},
            ValueError,
            "for ChainedOptimizer, whose host reads the skip flag or the learning rate",
        ),
        (
            {"make_schedule": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 1.0, 10)},
            ValueError,
            "OneCycleLR, which changes betas",
        ),
        (
            {"make_optimizer": lambda p: AdamW(p, lr=torch.tensor(0.1), fused=True)},
            ValueError,
            "rates must be numbers",
        ),
    ],
    ids=["optimizer", "Muon", "schedule", "rates"],
)
def test_what_cannot_be_captured_is_refused(settings, error, match):
    """A cell that no graph can hold is refused when it is built."""
    with pytest.raises(error, match=match):
        training(capture=True, **settings)


@pytest.mark.parametrize(
    ("average", "match"),
    [
        (
            lambda network: ExponentialMovingAverage(network, 0.9, update_every=2),
            "got update_every=2",
        ),
        (lambda network: ExponentialMovingAverage(network, 0.9, device="meta"), "another device"),
    ],
    ids=["update_every", "device"],
)
def test_an_average_that_cannot_be_captured_is_refused(average, match):
    """An average that does not follow each update on the device is refused."""
    network = Classifier()
    optimizer = AdamW(network.parameters(), fused=True)

    with pytest.raises(ValueError, match=match):
        MFTrainOneStepCell(network, optimizer, ema=average(network), capture=True)


def test_a_step_of_ones_own_is_refused():
    """A subclass with its own call would not be captured."""
    network = Classifier()
    optimizer = AdamW(network.parameters(), fused=True)

    with pytest.raises(ValueError, match="got Loop"):
        Loop(network, optimizer, capture=True)
    with pytest.raises(TypeError, match="`capture` must be a bool"):
        MFTrainOneStepCell(network, optimizer, capture="yes")


@needs("torch", "2.10", "stages that send over gloo")
def test_a_stage_of_a_pipeline_is_refused():
    """The messages between stages are not captured."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=distributed.HashStore())
    try:
        stage = PipelineStage(nn.Linear(2, 1), 0, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
        optimizer = AdamW(pipeline_stages(schedule).parameters(), fused=True)
        with pytest.raises(ValueError, match="must be False for a network on several ranks"):
            MFTrainOneStepCell(schedule, optimizer, capture=True)
    finally:
        distributed.destroy_process_group()


def test_a_capture_leaves_the_settings_of_the_optimizer():
    """Only within a capture, all groups are ``capturable``."""
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = AdamW([{"params": [first]}, {"params": [second], "capturable": True}], fused=True)

    with _capturable(optimizer):
        assert [group["capturable"] for group in optimizer.param_groups] == [True, True]

    assert [group["capturable"] for group in optimizer.param_groups] == [False, True]


def test_hooks_of_the_optimizer_are_refused():
    """A hook that a replay would not call is refused, also one that comes later."""
    trained = training(capture=True)
    train(trained, [1.0])
    trained.optimizer.register_step_post_hook(lambda *_: None)

    with pytest.raises(ValueError, match="hooks"):
        train(trained, [1.0])


def test_times_of_sections_are_refused():
    """A monitor that times the sections of a step is named."""
    trained = training(capture=True)
    monitor = RankClock()
    section_clock.start_for(monitor)

    with pytest.raises(RuntimeError, match="RankClock"):
        train(trained, [1.0])


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "AdamWeightDecay"])
def test_on_cuda_replays_are_the_plain_steps(optimizer):
    """On a GPU, replayed updates have the plain updates' numbers."""
    captured, plain = both(
        [1.0, NAN, 1.0, 1.0, 1.0, NAN, 1.0, 50.0, 1.0, 1.0],
        device="cuda",
        make_optimizer=OPTIMIZERS[optimizer],
        scale_sense=SCALES["dynamic"],
        use_clip_grad=True,
        local_norm=True,
        gradient_accumulation_steps=2,
        spike_policy="clip",
    )

    assert captured == pytest.approx(plain, rel=1e-5, abs=1e-7, nan_ok=True)
