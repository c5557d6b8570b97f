"""The gradients that a step uses, and their release after the step."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from support.small_networks import Classifier, LinearProbe, TokenClassifier, labelled_batches
from support.training_state import assert_unchanged, training_state


def sgd_cell(network: nn.Module, parameters=None, **settings) -> MFTrainOneStepCell:
    """Return a cell with SGD at rate 1 on all of the network, or on some parameters."""
    parameters = network.parameters() if parameters is None else parameters
    return MFTrainOneStepCell(network, SGD(parameters, lr=1.0, fused=True), **settings)


def assert_plain_update(cell: MFTrainOneStepCell, before: nn.Module, batch: tuple) -> None:
    """Fail unless the cell's network equals `before` after one step of plain SGD on `batch`."""
    reference = copy.deepcopy(before)
    reference(*batch).backward()
    names = [name for name, _ in reference.named_parameters()]
    for name in names:
        expected, actual = reference.get_parameter(name), cell.network.get_parameter(name)
        if expected.grad is not None:
            expected = expected - expected.grad
        torch.testing.assert_close(actual.detach(), expected.detach(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("factor", [1.0, float("nan")], ids=["applied", "skipped"])
def test_gradients_are_released(factor, fused):
    """After an applied and after a skipped step, every ``grad`` is None."""
    network, [batch] = Classifier(), labelled_batches(1)
    cell = MFTrainOneStepCell(network, AdamW(network.parameters(), fused=fused))

    cell(*batch, factor)

    assert all(weight.grad is None for weight in network.parameters())


def test_gradients_of_parameters_in_no_optimizer_are_released():
    """A warning names parameters in no optimizer, and the step releases their gradients."""
    network, [batch] = Classifier(), labelled_batches(1)
    before = copy.deepcopy(network)
    with pytest.warns(UserWarning, match=r"in no optimizer .*\['layers.2.weight', 'layers.2.bias'"):
        cell = sgd_cell(network, network.layers[0].parameters())

    cell(*batch)

    assert all(weight.grad is None for weight in network.parameters())
    assert torch.equal(network.layers[2].weight, before.layers[2].weight)
    assert not torch.equal(network.layers[0].weight, before.layers[0].weight)


def test_norms_concern_the_optimizers_parameters_alone():
    """The norm for clipping counts only gradients of the optimizer's parameters."""
    network, [batch] = Classifier(), labelled_batches(1)
    reference = copy.deepcopy(network)
    reference(*batch).backward()
    with pytest.warns(UserWarning, match="in no optimizer"):
        cell = sgd_cell(network, network.layers[0].parameters(), use_clip_grad=True)

    norm = cell(*batch).global_norm

    gradients = [weight.grad for weight in reference.layers[0].parameters()]
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(gradients))


class Borrowing(LinearProbe):
    """A network whose loss depends on a parameter outside the network."""

    def __init__(self, stranger: nn.Parameter) -> None:
        super().__init__()
        self._strangers = [stranger]

    def forward(self, inputs):
        return super().forward(inputs) + 1e6 * self._strangers[0].sum()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_parameters_outside_of_the_network_are_not_updated(fused):
    """A warning counts parameters outside the network; the step does not update them."""
    stranger = nn.Parameter(torch.ones(3))
    network = Borrowing(stranger)
    optimizer = SGD([network.weight, stranger], lr=1.0, weight_decay=0.1, fused=fused)
    with pytest.warns(UserWarning, match="1 parameters of the optimizer are not in the network"):
        cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, max_grad_norm=100.0)

    output = cell(torch.tensor([[3.0, 4.0]]))

    assert output.global_norm.item() == 5.0
    assert network.weight.tolist() == [-3.0, -4.0]
    assert torch.equal(stranger, torch.ones(3))
    assert stranger.grad is None


def test_a_leftover_gradient_does_not_leak_in():
    """Gradients of an earlier backward do not affect the step."""
    network, batches = Classifier(), labelled_batches(2)
    before = copy.deepcopy(network)
    cell = sgd_cell(network)
    network(*batches[1]).backward()

    cell(*batches[0])

    assert_plain_update(cell, before, batches[0])


class Stumbling(Classifier):
    """A classifier whose forward raises `error`, if the caller passes an error."""

    def forward(self, inputs, labels, error=None):
        if error is not None:
            raise error
        return super().forward(inputs, labels)


def test_an_error_in_a_later_micro_batch_leaves_everything_as_it_was():
    """An error in a later micro-batch leaves no gradients and does not affect the next step."""
    network, [batch] = Stumbling(), labelled_batches(1)
    ema = ExponentialMovingAverage(network, decay=0.9)
    cell = sgd_cell(network, ema=ema)
    before, state_before = copy.deepcopy(network), training_state(network, cell.optimizer, cell)

    with pytest.raises(ZeroDivisionError):
        cell.step([batch, (*batch, ZeroDivisionError())])

    assert all(weight.grad is None for weight in network.parameters())
    assert_unchanged(state_before, training_state(network, cell.optimizer, cell))
    assert cell.last_report is None
    cell(*batch)
    assert_plain_update(cell, before, batch)


def test_an_error_in_backward_leaves_everything_as_it_was():
    """An error in backward leaves weights and state unchanged, and no gradients."""
    network, [batch] = Classifier(), labelled_batches(1)
    cell = sgd_cell(network)
    state_before = training_state(network, cell.optimizer, cell)

    def fail(gradient):
        raise ZeroDivisionError

    handle = network.layers[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        cell(*batch)
    handle.remove()

    assert all(weight.grad is None for weight in network.parameters())
    assert_unchanged(state_before, training_state(network, cell.optimizer, cell))


class Tied(nn.Module):
    """Two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, inputs, labels):
        return nn.functional.cross_entropy(self.second(self.first(inputs).tanh()), labels)


def test_tied_weights_count_once():
    """A weight that two layers share has one norm, one update and one average."""
    network, [batch] = Tied(), labelled_batches(1)
    before = copy.deepcopy(network)
    ema = ExponentialMovingAverage(network, decay=0.9)
    cell = sgd_cell(network, local_norm=True, use_clip_grad=True, max_grad_norm=100.0, ema=ema)

    output = cell(*batch)

    assert cell.local_norm_names == ("first.weight", "first.bias", "second.bias")
    assert output.size.tolist() == [64, 8, 8]
    assert output.global_norm.item() == pytest.approx(output.local_norm.norm().item(), rel=1e-6)
    assert network.first.weight is network.second.weight
    assert_plain_update(cell, before, batch)


def test_frozen_parameters_stay_and_have_no_norm():
    """Frozen parameters belong to no group and are not updated."""
    network, [batch] = Classifier(), labelled_batches(1)
    network.layers[0].requires_grad_(requires_grad=False)
    before = copy.deepcopy(network)
    cell = sgd_cell(network, local_norm=True)

    output = cell(*batch)

    assert cell.local_norm_names == ("layers.2.weight", "layers.2.bias")
    assert output.size.tolist() == [64, 4]
    assert_plain_update(cell, before, batch)


def test_a_parameter_unfrozen_later_is_updated_and_reported():
    """A parameter unfrozen later is updated and gets a norm; older reports keep their names."""
    network, batches = Classifier(), labelled_batches(2)
    network.layers[0].requires_grad_(requires_grad=False)
    cell = sgd_cell(network, local_norm=True)
    cell(*batches[0])
    old_report = cell.last_report
    before = copy.deepcopy(network).requires_grad_()

    network.layers[0].requires_grad_(requires_grad=True)
    output = cell(*batches[1])

    assert old_report.local_norm_names == ("layers.2.weight", "layers.2.bias")
    assert len(cell.local_norm_names) == len(output.local_norm) == 4
    assert output.local_norm.ne(0).all()
    assert_plain_update(cell, before, batches[1])


def test_an_unused_parameter_has_the_norm_zero_and_stays():
    """An unused parameter has the norm 0 and gets neither optimizer state nor weight decay."""
    network, [batch] = Classifier(), labelled_batches(1)
    network.unused = nn.Linear(3, 3)
    before = copy.deepcopy(network.unused)
    optimizer = AdamW(network.parameters(), lr=0.1, weight_decay=0.5, fused=True)
    cell = MFTrainOneStepCell(network, optimizer, local_norm=True, use_clip_grad=True)

    output = cell(*batch)

    assert output.local_norm[-2:].tolist() == [0.0, 0.0]
    assert torch.equal(network.unused.weight, before.weight)
    assert network.unused.weight not in optimizer.state
    assert output.global_norm.isfinite()


def test_an_empty_parameter_has_the_norm_zero():
    """A parameter without elements has the norm 0."""
    network, [batch] = LinearProbe(), torch.tensor([[[3.0, 4.0]]])
    network.empty = nn.Parameter(torch.zeros(0))
    network.register_forward_hook(lambda module, _, loss: loss + module.empty.sum())

    output = sgd_cell(network, local_norm=True)(batch)

    assert output.local_norm.tolist() == [5.0, 0.0]
    assert output.size.tolist() == [2, 0]


def test_a_sparse_gradient_is_refused():
    """The error names the parameter and a remedy, and the weights stay unchanged."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 2, sparse=True)

        def forward(self, indices):
            return self.embedding(indices).sum()

    network = Sparse()
    before = network.embedding.weight.detach().clone()
    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=1.0))

    with pytest.raises(TypeError, match=r"`embedding.weight` must be dense.*sparse=False"):
        cell(torch.tensor([1, 2]))

    assert torch.equal(network.embedding.weight, before)
    assert network.embedding.weight.grad is None


def test_several_types_of_weights_in_one_network():
    """float32 and bfloat16 gradients share one norm, and weights of both dtypes are updated."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single, self.short = LinearProbe(), LinearProbe().bfloat16()

        def forward(self, inputs):
            return self.single(inputs) + self.short(inputs.bfloat16())

    network = Mixed()
    cell = MFTrainOneStepCell(
        network,
        SGD(network.parameters(), lr=1.0, foreach=True),
        use_clip_grad=True,
        max_grad_norm=100.0,
        scale_sense=4.0,
    )

    output = cell(torch.tensor([[3.0, 4.0]]))

    assert output.global_norm.item() == pytest.approx(50**0.5)
    assert network.single.weight.tolist() == network.short.weight.tolist() == [-3.0, -4.0]


COMPILATIONS = {
    "torch.compile": lambda network: torch.compile(network, backend="aot_eager"),
    "in place": lambda network: network.compile(backend="aot_eager") or network,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", COMPILATIONS.values(), ids=COMPILATIONS)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
def test_a_compiled_network_trains_like_the_plain_one(compiled, per_token):
    """A compiled network gives the group names of the uncompiled network, and close results."""
    network = TokenClassifier() if per_token else Classifier()
    settings = {
        "use_clip_grad": True,
        "local_norm": True,
        "local_norm_groups": "layer",
        "calculate_per_token_loss": per_token,
    }
    plain = sgd_cell(copy.deepcopy(network), **settings)
    cell = sgd_cell(compiled(network), **settings)

    for batch in labelled_batches(3):
        torch.testing.assert_close(tuple(cell(*batch)), tuple(plain(*batch)))

    assert cell.local_norm_names == plain.local_norm_names == ("layers.0", "layers.2")
    for ours, theirs in zip(network.parameters(), plain.network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
