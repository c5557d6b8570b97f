"""Bad input raises an error that names the argument, at construction where possible."""

import re

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, MFTrainOneStepCell
from support.small_llama import byte_batch, small_llama
from support.small_networks import Classifier, LinearProbe, TokenClassifier, labelled_batches
from support.training_state import assert_unchanged, training_state
from support.versions import needs


def build(network: nn.Module | None = None, **settings) -> MFTrainOneStepCell:
    """Return a cell with fused AdamW around `network`, by default a classifier."""
    network = Classifier() if network is None else network
    return MFTrainOneStepCell(network, AdamW(network.parameters(), fused=True), **settings)


BAD_SCALES = {
    "word": ("dynamic", TypeError),
    "list": ([1.0], TypeError),
    "class of an update cell": (DynamicLossScaleUpdateCell, TypeError),
    "module": (nn.Identity(), TypeError),
    "two elements": (torch.ones(2), ValueError),
    "two dimensions": (torch.ones(1, 1), ValueError),
    "zero": (0.0, ValueError),
    "negative": (-1.0, ValueError),
    "infinite": (float("inf"), ValueError),
    "nan": (torch.tensor(float("nan")), ValueError),
    "infinite in float32": (1e39, ValueError),
}


@pytest.mark.parametrize(("scale_sense", "error"), BAD_SCALES.values(), ids=BAD_SCALES)
def test_scale_sense_is_a_number_a_scalar_tensor_or_an_update_cell(scale_sense, error):
    """A wrong type of `scale_sense` is a TypeError, a wrong shape or value a ValueError."""
    with pytest.raises(error, match="`scale_sense` must"):
        build(scale_sense=scale_sense)


BAD_NEW_SCALES = {
    "number": (2.0, TypeError),
    "update cell": (DynamicLossScaleUpdateCell(2.0, 2, 2), TypeError),
    "two elements": (torch.ones(2), ValueError),
    "two dimensions": (torch.ones(1, 1), ValueError),
}


@pytest.mark.parametrize(("sens", "error"), BAD_NEW_SCALES.values(), ids=BAD_NEW_SCALES)
def test_set_sense_scale_takes_a_scalar_tensor(sens, error):
    """A `sens` that is not a scalar tensor raises an error and leaves the loss scale unchanged."""
    cell = build(scale_sense=4.0)

    with pytest.raises(error, match="`sens` must"):
        cell.set_sense_scale(sens)

    assert cell.scale_sense.item() == 4.0


def foreign_optimizer() -> AdamW:
    """Return an optimizer of another network."""
    return AdamW(Classifier().parameters())


BAD_SETTINGS = {
    "spike without norm": (
        {"use_skip_data_by_global_norm": True},
        ValueError,
        "`use_skip_data_by_global_norm` needs .*`use_clip_grad=True`",
    ),
    "max_grad_norm": ({"max_grad_norm": 0.0}, ValueError, "`max_grad_norm` must be > 0, got 0.0"),
    "threshold": (
        {"global_norm_spike_threshold": -1},
        ValueError,
        "`global_norm_spike_threshold` must be > 0",
    ),
    "accumulation": (
        {"gradient_accumulation_steps": 0},
        ValueError,
        "`gradient_accumulation_steps` must be >= 1",
    ),
    "accumulation is a float": (
        {"gradient_accumulation_steps": 2.0},
        TypeError,
        "`gradient_accumulation_steps` must be an int",
    ),
    "skips": ({"max_consecutive_skips": 0}, ValueError, "`max_consecutive_skips` must be >= 1"),
    "flag": ({"use_clip_grad": 1}, TypeError, "`use_clip_grad` must be a bool"),
    "pattern finds nothing": (
        {"local_norm_groups": ["layers", "missing"]},
        ValueError,
        r"`local_norm_groups` must match .*\['missing'\]",
    ),
    "groups": ({"local_norm_groups": 3}, TypeError, "`local_norm_groups` must be"),
    "ema": ({"ema": 0.999}, TypeError, "`ema` must be an ExponentialMovingAverage"),
    "schedule": ({"lr_scheduler": 0.1}, TypeError, "`lr_scheduler` must be a learning-rate"),
    "schedule of another optimizer": (
        {"lr_scheduler": ConstantLR(foreign_optimizer())},
        ValueError,
        "`lr_scheduler` must belong to the cell's optimizer",
    ),
    "schedule with a metric": (
        {"lr_scheduler": ReduceLROnPlateau(foreign_optimizer())},
        TypeError,
        "`lr_scheduler` must advance by itself, got ReduceLROnPlateau",
    ),
    "accelerator": (
        {"accelerator": "x"},
        TypeError,
        "`accelerator` must be an accelerate.Accelerator or None, got 'x' of type str",
    ),
    "unknown keyword": ({"max_gradnorm": 1.0}, TypeError, "max_gradnorm"),
}


@pytest.mark.parametrize(("settings", "error", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_a_bad_setting_is_refused_at_construction(settings, error, message):
    """The error names the argument, the expected value and the given value."""
    with pytest.raises(error, match=message):
        build(**settings)


def test_the_network_is_a_module():
    """A network that is a function raises a TypeError."""
    with pytest.raises(TypeError, match=r"`network` must be a torch.nn.Module, got"):
        MFTrainOneStepCell(lambda inputs: inputs.sum(), foreign_optimizer())


@pytest.mark.parametrize("optimizer", [None, "AdamW", AdamW], ids=str)
def test_the_optimizer_is_an_optimizer(optimizer):
    """An optimizer that is a name or a class raises a TypeError."""
    with pytest.raises(TypeError, match=r"`optimizer` must be a torch.optim.Optimizer, got"):
        MFTrainOneStepCell(Classifier(), optimizer)


def test_an_optimizer_with_a_closure_is_refused():
    """LBFGS raises an error, because it evaluates the loss itself."""
    network = Classifier()

    with pytest.raises(TypeError, match=r"`optimizer` must update from the gradients .*LBFGS"):
        MFTrainOneStepCell(network, torch.optim.LBFGS(network.parameters()))


class NeedsClosure(SGD):
    """An optimizer that cannot be stepped without arguments."""

    def step(self, closure):
        return super().step(closure)


def test_an_optimizer_that_needs_an_argument_is_refused():
    """An optimizer whose step needs an argument raises an error at construction."""
    network = Classifier()

    with pytest.raises(TypeError, match=r"got NeedsClosure, whose step needs closure"):
        MFTrainOneStepCell(network, NeedsClosure(network.parameters(), lr=0.1))


@needs("transformers", "5.5", "GreedyLR")
def test_a_schedule_that_follows_a_metric_is_refused():
    """A schedule whose step needs a metric raises an error, because the cell has no metric."""
    from transformers.optimization import GreedyLR  # noqa: PLC0415  (not in every version)

    network = Classifier()
    optimizer = AdamW(network.parameters())

    with pytest.raises(TypeError, match="got GreedyLR, whose step needs metrics"):
        MFTrainOneStepCell(network, optimizer, lr_scheduler=GreedyLR(optimizer))


def test_an_average_of_weights_that_were_converted_since_is_refused():
    """An average built before the weights changed their dtype raises an error at construction."""
    network = Classifier()
    ema = ExponentialMovingAverage(network)
    network.to(torch.bfloat16)

    with pytest.raises(RuntimeError, match="`ema` must match the network's weights, on cpu in"):
        build(network, ema=ema)


def test_an_average_of_another_network_is_refused():
    """An average of another network raises an error: its weights are not trained."""
    with pytest.raises(ValueError, match="`ema` must average parameters that the cell trains"):
        build(ema=ExponentialMovingAverage(Classifier()))


def test_an_optimizer_of_another_network_is_refused():
    """An optimizer without any parameter of the trained network raises an error."""
    with pytest.raises(ValueError, match="`optimizer` must hold parameters of the network"):
        MFTrainOneStepCell(Classifier(), foreign_optimizer())


def fused_sgd_updates_half_precision() -> bool:
    """Return whether fused SGD on CPU updates bfloat16 weights; pytorch#191763 makes it False."""
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    SGD([weight], lr=0.5, fused=True).step()
    return bool((weight == 0.5).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.skipif(fused_sgd_updates_half_precision(), reason="this torch's fused SGD is sound")
def test_fused_sgd_that_leaves_half_precision_weights_is_refused(dtype):
    """Fused SGD that would not update half-precision weights on CPU raises an error."""
    network = Classifier().to(dtype)
    optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)

    with pytest.raises(ValueError, match=r"`optimizer` must .*fused"):
        MFTrainOneStepCell(network, optimizer)


def assert_refused(cell: MFTrainOneStepCell, call, error: type[Exception], message: str) -> None:
    """Fail unless `call` raises the error, changes no training state and leaves no gradients."""
    before = training_state(cell.network, cell.optimizer, cell)

    with pytest.raises(error, match=message):
        call()

    assert_unchanged(before, training_state(cell.network, cell.optimizer, cell))
    assert all(weight.grad is None for weight in cell.network.parameters())


def test_a_batch_that_does_not_split_is_refused():
    """The error names the input, its shape and the number of parts."""
    cell = build(gradient_accumulation_steps=3)
    [(inputs, labels)] = labelled_batches(1)
    message = re.escape(
        "the first dimension of `inputs[0]` must be divisible by gradient_accumulation_steps=3, "
        "got shape (8, 8)"
    )

    assert_refused(cell, lambda: cell(inputs, labels), ValueError, message)
    assert_refused(cell, lambda: cell(inputs[:6], labels=labels), ValueError, "`labels`")


BAD_MICRO_BATCHES = {
    "none": ([], ValueError, "at least one micro-batch"),
    "generator": ((batch for batch in ()), TypeError, "must be a sequence, got generator"),
    "tensor": (torch.ones(2, 8), TypeError, "must be a sequence, got Tensor"),
    "mapping": ({"inputs": None}, TypeError, "must be a sequence, got dict"),
    "word": ("batch", TypeError, "must be a sequence, got str"),
}


@pytest.mark.parametrize(
    ("micro_batches", "error", "message"), BAD_MICRO_BATCHES.values(), ids=BAD_MICRO_BATCHES
)
def test_micro_batches_are_a_sequence_of_at_least_one(micro_batches, error, message):
    """If `micro_batches` is empty or not a sequence, an error says what is expected."""
    cell = build()

    assert_refused(cell, lambda: cell.step(micro_batches), error, f"`micro_batches` .*{message}")


def test_micro_batches_that_have_no_local_norms():
    """Several micro-batches that are reduced one by one have no local norms; a single one has."""
    cell = build(local_norm=True, sync_each_batch=True)
    [batch] = labelled_batches(1)
    message = "`local_norm` must be False if `sync_each_batch` reduces .* with 2 micro-batches"

    assert_refused(cell, lambda: cell.step([batch, batch]), ValueError, message)
    assert cell.step([batch]).local_norm.isfinite().all()


class Returning(LinearProbe):
    """A network that returns a given value."""

    def __init__(self, result) -> None:
        super().__init__()
        self._result = result

    def forward(self, inputs):
        return self._result(self.weight.sum() * inputs.sum())


NO_LOSS = {
    "None": (lambda _: None, TypeError, "`network` must return a loss"),
    "nothing": (lambda _: (), TypeError, "`network` must return a loss"),
    "mapping without loss": (lambda loss: {"x": loss}, TypeError, "`network` must return a loss"),
    "loss is None": (lambda _: {"loss": None}, TypeError, "`network` must return a loss"),
    "number": (lambda _: (1.0,), TypeError, "the loss that `network` returns must be a tensor"),
    "several elements": (
        lambda loss: loss.expand(3),
        ValueError,
        r"the loss that `network` returns must have exactly one element, got shape \(3,\)",
    ),
    "detached": (
        lambda loss: loss.detach(),
        ValueError,
        "the loss that `network` returns must depend on a trainable parameter",
    ),
}


@pytest.mark.parametrize(("result", "error", "message"), NO_LOSS.values(), ids=NO_LOSS)
def test_the_network_returns_a_loss(result, error, message):
    """A network must return a loss of one element with a graph; other outputs raise an error."""
    cell = build(Returning(result))

    assert_refused(cell, lambda: cell(torch.ones(2)), error, message)


NO_PAIR = {
    "scalar": (lambda loss: loss, TypeError, r"must return \(numerator, denominator\)"),
    "three": (lambda loss: (loss, 1, 2), TypeError, "got tuple of 3"),
    "denominator is a word": (lambda loss: (loss, "two"), TypeError, "the denominator"),
    "several denominators": (lambda loss: (loss, torch.ones(2)), ValueError, "the denominator"),
    "several numerators": (lambda loss: (loss.expand(2), 1), ValueError, "the numerator"),
    "detached": (lambda loss: (loss.detach(), 1), ValueError, "the numerator"),
}


@pytest.mark.parametrize(("result", "error", "message"), NO_PAIR.values(), ids=NO_PAIR)
def test_a_per_token_network_returns_numerator_and_denominator(result, error, message):
    """An output that is not a numerator and a denominator raises an error."""
    cell = build(Returning(result), calculate_per_token_loss=True)

    assert_refused(cell, lambda: cell(torch.ones(2)), error, message)


def test_a_language_model_without_labels_is_refused():
    """A batch without labels raises an error, for mean losses and for per-token losses."""
    batch = byte_batch([8, 8])
    del batch["labels"]
    mean = build(small_llama())
    per_token = build(small_llama(), calculate_per_token_loss=True)

    assert_refused(mean, lambda: mean(**batch), TypeError, "must return a loss.*`labels`")
    assert_refused(
        per_token, lambda: per_token(**batch), ValueError, "the batch must have `labels`"
    )


def test_a_loss_that_reaches_no_parameter_of_the_optimizer_is_refused():
    """A loss without a gradient for any parameter of the optimizer raises an error."""
    network = Classifier()
    network.unused = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="in no optimizer"):
        cell = MFTrainOneStepCell(network, AdamW(network.unused.parameters(), fused=True))

    message = "no parameter of the optimizer has a gradient"
    assert_refused(cell, lambda: cell(*labelled_batches(1)[0]), RuntimeError, message)


def test_a_parameter_added_later_is_refused():
    """A parameter added to the optimizer after construction raises an error at the next step."""
    cell = build()
    cell.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    message = "`optimizer` must hold the same 4 parameters as .*build a new cell"
    assert_refused(cell, lambda: cell(*labelled_batches(1)[0]), RuntimeError, message)


def test_an_average_inside_its_swap_is_refused_before_anything_is_changed():
    """A step while the averages are in the network raises an error and changes nothing."""
    network = Classifier()
    ema = ExponentialMovingAverage(network, decay=0.9)
    cell = build(network, ema=ema)

    with ema.swap():
        before = training_state(network, cell.optimizer)
        with pytest.raises(RuntimeError, match="swap"):
            cell(*labelled_batches(1)[0])
        assert_unchanged(before, training_state(network, cell.optimizer))


def test_good_input_passes():
    """The cells of these tests accept valid input."""
    [batch] = labelled_batches(1)

    assert build(gradient_accumulation_steps=2)(*batch).loss.isfinite()
    assert build(TokenClassifier(), calculate_per_token_loss=True)(*batch).loss.isfinite()
    assert build().step([batch]).loss.isfinite()
    assert build(Returning(lambda loss: loss))(torch.ones(2)).loss.isfinite()
