"""`attach` and `prepare` raise errors that name an unsupported argument, and change nothing."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.optim import LBFGS, SGD, AdamW

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.accelerate import attach
from support.attached_runs import new_accelerator
from support.small_networks import Classifier, labelled_batches
from support.training_state import assert_same_state, training_state

[BATCH] = labelled_batches(1)


def of_type(distributed_type):
    """Return an accelerator whose state reports this distributed type."""
    accelerator = new_accelerator()
    accelerator.state.distributed_type = distributed_type
    if distributed_type == DistributedType.FSDP:
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    return accelerator


def in_fp16_without_scaler():
    """Return an accelerator with the settings of fp16 on CUDA but without a gradient scaler."""
    accelerator = new_accelerator("fp16")
    accelerator.scaler = None
    accelerator.state.device = torch.device("cuda")
    return accelerator


def in_fp16_with_a_disabled_scaler():
    """Return an accelerator with the settings of fp16 on CUDA and a disabled gradient scaler."""
    accelerator = in_fp16_without_scaler()
    accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    return accelerator


def that_has_prepared(make):
    """Return an accelerator that has prepared ``make(network)`` for a new network."""
    accelerator = new_accelerator()
    accelerator.prepare(make(Classifier()))
    return accelerator


def attached():
    """Return an accelerator that is already attached."""
    accelerator = new_accelerator()
    attach(accelerator)
    return accelerator


def schedule_of(network):
    """Return a schedule whose optimizer accelerate has not prepared."""
    return torch.optim.lr_scheduler.StepLR(SGD(network.parameters(), lr=0.1), 1)


SETTINGS = {
    "a config of another kind": (TypeError, "`config` must be a StepConfig", {"config": {}}),
    "the average of no kind": (TypeError, "`ema` must be an Exponential", {"ema": 0.999}),
    "a scale in words": (TypeError, "`scale_sense` must be a number", {"scale_sense": "dynamic"}),
    "a scale of zero": (ValueError, "`scale_sense` must be > 0", {"scale_sense": 0.0}),
    "a scale of infinity": (ValueError, "`scale_sense` must be > 0", {"scale_sense": torch.inf}),
    "several scales": (ValueError, "`scale_sense` must have shape", {"scale_sense": torch.ones(2)}),
    "losses per token": (
        ValueError,
        "`calculate_per_token_loss` must be False",
        {"config": StepConfig(calculate_per_token_loss=True)},
    ),
    "another accumulation": (
        ValueError,
        "`gradient_accumulation_steps` must be 1, as in the accelerator, or left at 1, got 4",
        {"config": StepConfig(gradient_accumulation_steps=4)},
    ),
    "inputs that are not split": (
        ValueError,
        r"`not_split` must be left out in a loop, which .*, got \['axes'\]",
        {"config": StepConfig(not_split=["axes"])},
    ),
    "a reduction of each micro-batch": (
        ValueError,
        "`sync_each_batch` must be left out in a loop",
        {"config": StepConfig(sync_each_batch=True)},
    ),
}
ACCELERATORS = {
    "attached": (RuntimeError, "is attached already; call `detach`", attached),
    "with a network": (
        RuntimeError,
        "`attach` must be called before",
        lambda: that_has_prepared(lambda network: network),
    ),
    "with an optimizer": (
        RuntimeError,
        "`attach` must be called before",
        lambda: that_has_prepared(lambda network: SGD(network.parameters(), lr=0.1)),
    ),
    "with a schedule": (
        RuntimeError,
        "`attach` must be called before",
        lambda: that_has_prepared(schedule_of),
    ),
    "in fp16 without scaler": (
        ValueError,
        "`scale_sense` must be given for an accelerator that trains in fp16",
        in_fp16_without_scaler,
    ),
    "in fp16 with a disabled scaler": (
        ValueError,
        "`scale_sense` must be given for an accelerator that trains in fp16",
        in_fp16_with_a_disabled_scaler,
    ),
    **{
        str(kind.value): (
            ValueError,
            "`accelerator` must train in one process, under DistributedDataParallel or under FSDP2",
            lambda kind=kind: of_type(kind),
        )
        for kind in (
            DistributedType.DEEPSPEED,
            DistributedType.FSDP,
            DistributedType.MEGATRON_LM,
            DistributedType.XLA,
        )
    },
}


def assert_refused(accelerator, error, message, **settings):
    """Check that `attach` raises and leaves the accelerator unchanged."""
    before = dict(vars(accelerator))
    hooks = len(accelerator._save_model_state_pre_hook), len(accelerator._load_model_state_pre_hook)
    kind = type(accelerator)

    with pytest.raises(error, match=message):
        attach(accelerator, **settings)

    assert vars(accelerator) == before
    assert type(accelerator) is kind
    assert hooks == (
        len(accelerator._save_model_state_pre_hook),
        len(accelerator._load_model_state_pre_hook),
    )


@pytest.mark.parametrize(("error", "message", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_that_does_not_fit_is_refused(error, message, settings):
    """`attach` raises an error that names the invalid setting, and changes nothing."""
    assert_refused(new_accelerator(), error, message, **settings)


@pytest.mark.parametrize(("error", "message", "make"), ACCELERATORS.values(), ids=ACCELERATORS)
def test_an_accelerator_that_does_not_fit_is_refused(error, message, make):
    """`attach` rejects an unsupported accelerator and leaves it unchanged."""
    assert_refused(make(), error, message)


@pytest.mark.parametrize(
    "accelerator", [None, "accelerator", Accelerator, nn.Linear(1, 1)], ids=repr
)
def test_only_an_accelerator_can_be_attached(accelerator):
    """`attach` raises a TypeError for any object that is not an accelerator."""
    with pytest.raises(TypeError, match=r"`accelerator` must be an accelerate\.Accelerator, got"):
        attach(accelerator)


def test_accelerates_reduction_of_each_micro_batch_is_taken_over():
    """The step has accelerate's `sync_each_batch`, and no local norms of several micro-batches."""

    def accelerator(steps):
        plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=True)
        return new_accelerator(gradient_accumulation_plugin=plugin)

    for config in (StepConfig(), StepConfig(sync_each_batch=True)):
        assert attach(accelerator(4), config).config.sync_each_batch
    assert attach(accelerator(1), StepConfig(local_norm=True)).config.sync_each_batch
    assert_refused(
        accelerator(4),
        ValueError,
        "`local_norm` must be False if `sync_each_batch` reduces .* with 4 micro-batches",
        config=StepConfig(local_norm=True),
    )


def test_a_communication_hook_is_given_once():
    """`attach` raises if a handler and `communication_hook` both set a hook."""
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    assert_refused(
        new_accelerator(kwargs_handlers=[handler]),
        ValueError,
        r"`communication_hook` must be None .* got both \(`comm_hook` is fp16\)",
        communication_hook=(None, fp16_compress_hook),
    )
    assert type(handler) is DistributedDataParallelKwargs


def test_a_communication_hook_is_a_state_and_a_callable():
    """`attach` raises a TypeError if `communication_hook` is not a pair of state and hook."""
    assert_refused(
        new_accelerator(),
        TypeError,
        r"`communication_hook` must be \(state, hook\)",
        communication_hook=fp16_compress_hook,
    )


@pytest.mark.parametrize("steps", [1, 4])
def test_the_accelerators_accumulation_may_be_given_or_left_out(steps):
    """`attach` accepts a config with the accelerator's accumulation or with the default of 1."""
    accelerator = new_accelerator(gradient_accumulation_steps=4)

    step = attach(accelerator, StepConfig(gradient_accumulation_steps=steps))

    assert accelerator.attachment is step.attachment


AVERAGES = {
    "of another network": (
        ValueError,
        "`ema` must average parameters of a prepared optimizer, got an average of other parameters",
        lambda _: ExponentialMovingAverage(Classifier()),
    ),
    "that is none": (
        TypeError,
        "`ema` must return an ExponentialMovingAverage, got",
        lambda _: lambda network: network,
    ),
    "of a network that was converted since": (
        RuntimeError,
        "`ema` must match the network's weights, on cpu in torch.float64",
        ExponentialMovingAverage,
    ),
}


@pytest.mark.parametrize(("error", "message", "make"), AVERAGES.values(), ids=AVERAGES)
def test_an_average_that_does_not_fit_is_refused(error, message, make):
    """An unsuitable average raises before the first update, so no weight changes."""
    network = Classifier()
    accelerator = new_accelerator()
    attach(accelerator, ema=make(network))
    if error is RuntimeError:
        network.double()
    optimizer = AdamW(network.parameters(), fused=True)
    before = training_state(network, optimizer)

    def begin():
        accelerator.prepare(network, optimizer)
        accelerator.backward(network(*BATCH))

    with pytest.raises(error, match=message):
        begin()

    assert_same_state(before, training_state(network, optimizer))


@pytest.mark.cuda
def test_an_average_from_before_the_network_was_moved_is_refused():
    """`prepare` raises if the average is on the CPU and the network moves to CUDA."""
    accelerator = Accelerator()
    network = Classifier()
    attach(accelerator, ema=ExponentialMovingAverage(network))

    with pytest.raises(RuntimeError, match="build `ema` after you move or convert the network"):
        accelerator.prepare(network, AdamW(network.parameters(), fused=True))


@pytest.mark.parametrize("num_networks", [0, 2])
def test_a_callable_average_needs_exactly_one_network(num_networks):
    """A callable average raises an error if no network or several networks are prepared."""
    accelerator = new_accelerator()
    attach(accelerator, ema=ExponentialMovingAverage)
    networks = [Classifier() for _ in range(num_networks)]
    outside = nn.Parameter(torch.ones(()))
    parameters = [p for network in networks for p in network.parameters()] or [outside]

    def begin():
        accelerator.prepare(*networks, SGD(parameters, lr=0.1))
        accelerator.backward(outside * 1.0)

    with pytest.raises(ValueError, match=f"exactly one model is trained, got {num_networks} mod"):
        begin()


def test_a_callable_average_gets_the_model_that_is_trained():
    """A prepared model without parameters in an optimizer has no average."""
    accelerator = new_accelerator()
    step = attach(accelerator, ema=ExponentialMovingAverage)
    teacher, network = nn.Linear(2, 1), nn.Linear(2, 1)

    accelerator.prepare(teacher, network, SGD(network.parameters(), lr=0.1))

    assert step.ema.follows(network.parameters())
    assert not step.ema.follows(teacher.parameters())


OPTIMIZERS = {
    "LBFGS": (TypeError, "got LBFGS", lambda network: LBFGS(network.parameters())),
    "idle fused SGD": (
        ValueError,
        "got fused SGD with half-precision weights on CPU",
        lambda network: SGD(network.bfloat16().parameters(), lr=0.1, fused=True),
    ),
}


@pytest.mark.parametrize(("error", "message", "make"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_that_cannot_skip_is_refused_when_prepared(error, message, make):
    """`prepare` raises for an optimizer that cannot skip updates."""
    accelerator = new_accelerator()
    attach(accelerator)
    network = Classifier()

    with pytest.raises(error, match=message):
        accelerator.prepare(network, make(network))
