"""The parameters of an update: in optimizer and network, trainable, with a gradient."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfwrap import MFTrainOneStepCell, WithLossCell
from mfwrap.step.parameters import (
    TrainedParameters,
    checked_network,
    checked_optimizer,
    network_parameters,
)
from mfwrap.tensors.norms import sums_by_group
from support.one_rank import one_rank
from support.small_llama import needs_stages, small_llama, split_for_generation


class Tied(nn.Module):
    """A small language model whose output projection is the embedding."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.embedding = nn.Embedding(6, 4, sparse=sparse)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        """Return logits."""
        return self.head(self.body(self.embedding(ids)))


NAMES = ("embedding.weight", "body.weight", "body.bias")
IDS = torch.tensor([[0, 1], [2, 3]])


def trained(network, parameters=None, groups=None):
    """Return the `TrainedParameters` of a network, and the optimizer."""
    optimizer = SGD(network.parameters() if parameters is None else parameters, lr=0.1)
    return TrainedParameters(network_parameters(network), optimizer, groups), optimizer


def test_parameters_have_the_networks_order():
    """Names and gradients follow the network's order, whatever the optimizer's order is."""
    network = Tied()
    backwards = [network.body.bias, network.body.weight, network.head.weight]
    ours, _ = trained(network, [{"params": [parameter]} for parameter in backwards])
    network(IDS).sum().backward()

    assert ours.groups().names == NAMES
    expected = [parameter.grad for parameter in network.parameters()]
    assert all(a is b for a, b in zip(ours.collect_gradients(), expected, strict=True))
    assert list(ours.named_gradients()) == list(NAMES)


def test_a_tied_weight_counts_once():
    """A tied weight has one size, and one name: the first."""
    ours, _ = trained(Tied())

    assert ours.groups().names == NAMES
    assert ours.groups().sizes.tolist() == [24, 16, 4]


def test_a_module_that_is_used_twice_counts_once():
    """The parameters of a module that is used twice are listed once."""
    layer = nn.Linear(2, 2)
    ours, _ = trained(nn.Sequential(layer, nn.Tanh(), layer))

    assert ours.groups().names == ("0.weight", "0.bias")


def test_an_unused_parameter_has_no_gradient():
    """An unused parameter has the gradient None and is left out of the named gradients."""
    network = Tied()
    ours, _ = trained(network)
    network.embedding(IDS).sum().backward()

    assert [gradient is None for gradient in ours.collect_gradients()] == [False, True, True]
    assert list(ours.named_gradients()) == ["embedding.weight"]


def test_a_frozen_parameter_is_in_no_group():
    """A frozen parameter is in no group and has None among the gradients."""
    network = Tied()
    network.body.weight.requires_grad_(requires_grad=False)
    ours, _ = trained(network)
    network(IDS).sum().backward()

    assert ours.groups().names == ("embedding.weight", "body.bias")
    assert [gradient is None for gradient in ours.collect_gradients()] == [False, True, False]


def test_groups_follow_what_is_frozen_and_unfrozen_later():
    """Gradual unfreezing changes the groups from the next step on."""
    network = Tied()
    network.body.requires_grad_(requires_grad=False)
    ours, _ = trained(network, groups="layer")
    assert ours.groups().names == ("embedding",)

    network.body.requires_grad_(requires_grad=True)
    assert ours.groups().names == ("embedding", "body")
    assert ours.groups().sizes.tolist() == [24, 20]
    network.embedding.requires_grad_(requires_grad=False)
    assert ours.groups().names == ("body",)


def test_a_pattern_whose_parameters_are_frozen_later_drops_out():
    """A pattern whose parameters are all frozen later has no group, even if no group is left."""
    network = Tied()
    ours, _ = trained(network, groups=["embedding", "body"])

    network.embedding.requires_grad_(requires_grad=False)
    assert ours.groups().names == ("body",)
    network.requires_grad_(requires_grad=False)
    assert ours.groups().names == ()
    assert ours.groups().members.shape == (0, 0)
    assert sums_by_group(torch.ones(3), ours.groups().members).shape == (0,)


def test_groups_are_built_again_only_when_they_change():
    """Unchanged groups are returned as the same object."""
    ours, _ = trained(Tied())

    assert ours.groups() is ours.groups()


def test_a_trainable_parameter_in_no_optimizer_is_named_in_one_warning():
    """One warning names all trainable parameters that are in no optimizer."""
    network = Tied()
    message = r"trainable parameters are in no optimizer .* \['body.weight', 'body.bias'\]$"
    with pytest.warns(UserWarning, match=message) as seen:
        ours, _ = trained(network, [network.head.weight])

    assert len(seen) == 1
    assert ours.groups().names == ("embedding.weight",)


def test_a_frozen_parameter_in_no_optimizer_is_no_reason_to_warn():
    """A frozen parameter that is in no optimizer does not cause a warning."""
    network = Tied()
    network.body.requires_grad_(requires_grad=False)
    ours, _ = trained(network, [network.head.weight])

    assert ours.groups().names == ("embedding.weight",)


def test_parameters_outside_of_the_network_are_counted_in_a_warning_and_not_updated():
    """A warning counts parameters outside the network, and their gradients are set to None."""
    network, other = Tied(), nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="2 parameters of the optimizer are not in the network"):
        ours, _ = trained(network, [*network.parameters(), *other.parameters()])
    other(network.body(torch.ones(4))).sum().backward()
    ours.collect_gradients()

    assert [parameter.grad for parameter in other.parameters()] == [None, None]
    assert network.body.weight.grad is not None


@pytest.mark.parametrize("held", [slice(0, 1), slice(0, 2)], ids=["missing", "outside"])
def test_warnings_point_at_the_line_that_built_the_cell(held):
    """Warnings name the file that built the cell."""
    network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
    outside = [nn.Parameter(torch.ones(1))] if held.stop == 2 else []
    optimizer = SGD([*list(network.parameters())[held], *outside], lr=0.1)
    with pytest.warns(UserWarning, match="optimizer") as seen:
        MFTrainOneStepCell(network, optimizer)

    assert [warning.filename for warning in seen] == [__file__]


def test_all_gradients_are_released():
    """Gradients are released even if a parameter is frozen, or outside the optimizer or network."""
    network, other = Tied(), nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="optimizer"):
        ours, _ = trained(network, [network.head.weight, *other.parameters()])
    everything = [*network.parameters(), *other.parameters()]
    for parameter in everything:
        parameter.grad = torch.ones_like(parameter)
    network.body.requires_grad_(requires_grad=False)
    ours.release_gradients()

    assert all(parameter.grad is None for parameter in everything)


def test_an_optimizer_of_another_network_is_refused():
    """An optimizer without any parameter of the network raises an error."""
    with pytest.raises(ValueError, match="`optimizer` must hold parameters of the network, got 3 "):
        trained(Tied(), Tied().parameters())


def test_an_optimizer_of_frozen_parameters_is_refused():
    """An optimizer that holds only frozen parameters raises an error."""
    with pytest.raises(ValueError, match="must hold a trainable parameter, got 3 that are"):
        trained(Tied().requires_grad_(requires_grad=False))


def test_a_pattern_that_finds_nothing_is_refused_at_construction():
    """A pattern without a matching parameter raises an error at construction."""
    with pytest.raises(ValueError, match=r"got no match for \['decoder'\]"):
        trained(Tied(), groups=["body", "decoder"])


@pytest.mark.parametrize("change", ["added", "replaced", "removed"])
def test_parameters_that_change_later_are_refused(change):
    """A change of the optimizer's parameters after construction raises an error."""
    network = Tied()
    ours, optimizer = trained(network)
    network(IDS).sum().backward()
    held = optimizer.param_groups[0]["params"]
    if change == "added":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    elif change == "replaced":
        held[0] = nn.Parameter(held[0].detach().clone())
    else:
        held.pop()

    with pytest.raises(RuntimeError, match=r"must hold the same 3 parameters .* build a new cell"):
        ours.collect_gradients()


def test_a_step_without_gradients_is_refused():
    """A step raises an error if no parameter of the optimizer has a gradient."""
    ours, _ = trained(Tied())

    with pytest.raises(RuntimeError, match="no parameter of the optimizer has a gradient"):
        ours.collect_gradients()


def test_a_sparse_gradient_is_refused_by_name():
    """The error names the parameter and suggests ``sparse=False``."""
    network = Tied(sparse=True)
    ours, _ = trained(network)
    network.embedding(IDS).sum().backward()

    with pytest.raises(TypeError, match=r"`embedding.weight` must be dense.*sparse=False"):
        ours.collect_gradients()
    after_dense = nn.Sequential(nn.Linear(4, 1), nn.Embedding(6, 4, sparse=True))
    ours, _ = trained(after_dense)
    after_dense[0](after_dense[1](IDS)).sum().backward()
    with pytest.raises(TypeError, match=r"`1.weight` must be dense"):
        ours.collect_gradients()


def test_names_are_those_without_torch_compile():
    """Names have no prefix if the network, or a part of it, is compiled."""
    network = Tied()
    network.body = torch.compile(network.body, backend="eager")

    assert trained(network)[0].groups().names == NAMES
    assert trained(torch.compile(Tied(), backend="eager"))[0].groups().names == NAMES


def test_gradients_have_the_placements_of_their_parameters(tmp_path):
    """A gradient of partial sums is added up; a gradient that is placed already stays as it is."""
    network = Tied()
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        network.body.bias = nn.Parameter(distribute_tensor(network.body.bias.detach(), mesh))
        ours, _ = trained(network)
        bias = network.body.bias
        bias.grad = distribute_tensor(torch.ones(bias.shape), mesh)
        assert ours.collect_gradients()[2] is bias.grad

        bias.grad = DTensor.from_local(torch.ones(bias.shape), mesh, [Partial()])
        placed = ours.collect_gradients()[2]
        assert placed is bias.grad
        assert placed.placements == bias.placements
        assert torch.equal(placed.to_local(), torch.ones(bias.shape))


def test_parameters_over_overlapping_sets_of_ranks_are_refused():
    """If no parameter spans all ranks, a NaN on one rank would not reach every rank's norm."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
        for layer, over in zip(network, ("data", "experts"), strict=False):
            shard = DTensor.from_local(torch.zeros(2, 4), mesh[over], [Shard(0)], run_check=False)
            layer.weight = nn.Parameter(shard)
        with pytest.raises(
            ValueError, match=r"over ranks \[0, 2\], others over ranks \[0, 1\], and"
        ):
            trained(network)

        shard = DTensor.from_local(torch.zeros(1, 4), mesh, [Shard(0)] * 2, run_check=False)
        network[2].weight = nn.Parameter(shard)
        assert trained(network)[0].reduction.sets == [[0, 2], [0, 1], [0, 1, 2, 3]]
    finally:
        distributed.destroy_process_group()


def test_the_training_device_is_the_first_parameters():
    """The training device is the device of the weights."""
    assert trained(Tied())[0].device == torch.device("cpu")
    assert trained(Tied().to("meta"))[0].device == torch.device("meta")


@pytest.mark.parametrize("network", [None, "Llama", nn.Linear, math.sqrt], ids=str)
def test_what_is_no_network_is_refused(network):
    """A value that is not a module, such as a class or a function, raises a TypeError."""
    with pytest.raises(TypeError, match=r"`network` must be a torch.nn.Module, got"):
        checked_network(network)


def test_an_engine_of_deepspeed_is_refused(monkeypatch):
    """It has a training step of its own."""

    class DeepSpeedEngine(nn.Module):
        """Stands for the class of the library, which is not installed."""

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine))
    with pytest.raises(TypeError, match="must not be a DeepSpeed engine"):
        checked_network(DeepSpeedEngine())


def test_a_network_is_returned_as_it_is():
    """A module is returned unchanged."""
    network = Tied()

    assert checked_network(network) is network


@pytest.mark.parametrize("optimizer", [None, "SGD", SGD, nn.Linear(1, 1), 0.1], ids=repr)
def test_what_is_no_optimizer_is_refused(optimizer):
    """A value that is not an optimizer, such as the class itself, raises a TypeError."""
    with pytest.raises(TypeError, match=r"`optimizer` must be a torch.optim.Optimizer, got"):
        checked_optimizer(optimizer)


def with_check(network):
    """Return the `TrainedParameters` of a network, which find replaced parameters."""
    return TrainedParameters.of_network(network, SGD(network.parameters(), lr=0.1))


def test_a_replaced_parameter_is_found_in_the_next_update():
    """A parameter that was replaced is an error: the optimizer updates the old one."""
    network = Tied()
    ours = with_check(network)
    network(IDS).sum().backward()
    ours.collect_gradients()
    ours.release_gradients()

    network.body.bias = nn.Parameter(torch.zeros(4))
    network(IDS).sum().backward()

    with pytest.raises(RuntimeError, match=r"no longer in the network: \['body\.bias'\]"):
        ours.collect_gradients()


def test_a_replaced_parameter_is_named_at_a_save():
    """A parameter that already had no gradient before it was replaced is named at a save."""
    network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
    network.unused = nn.Linear(1, 1)
    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1))
    batch = torch.ones(2, 2), torch.ones(2, 1)
    cell(*batch)

    network.unused.weight = nn.Parameter(torch.zeros(1, 1))
    cell(*batch)

    with pytest.warns(UserWarning, match=r"no longer in the network: \['unused\.weight'\]") as seen:
        cell.state_dict()
    assert seen[0].filename == __file__


def freeze(network):
    """Replace a parameter by one that is not trained."""
    network.body.bias = nn.Parameter(torch.zeros(4), requires_grad=False)


def remove(network):
    """Remove a module."""
    network.body = nn.Identity()


@pytest.mark.parametrize("change", [freeze, remove])
def test_a_network_may_lose_parameters(change):
    """A parameter that was removed, or replaced by a frozen one, is no error."""
    network = Tied()
    ours = with_check(network)
    change(network)
    network(IDS).sum().backward()

    assert None in ours.collect_gradients()
    ours.warn_of_replaced()


def test_a_network_may_gain_parameters():
    """A parameter that was added later, and replaces no other, is no error."""
    network = Tied()
    ours = with_check(network)
    network.added = nn.Parameter(torch.zeros(4))
    network(IDS).sum().backward()

    assert None not in ours.collect_gradients()
    ours.warn_of_replaced()


@needs_stages
def test_stages_of_transformers_are_refused():
    """A network that transformers has split for generation cannot be trained."""
    network = split_for_generation(small_llama())

    with pytest.raises(ValueError, match="must not be split by transformers, got pp_size=2"):
        MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1))


def test_version_1_of_fsdp_is_refused():
    """A cell refuses FullyShardedDataParallel anywhere in its network."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        part = FullyShardedDataParallel(nn.Linear(2, 1), device_id=torch.device("cpu"))
        network = WithLossCell(part, nn.MSELoss())
        with pytest.raises(TypeError, match="must not contain version 1 of FSDP"):
            MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1))
    finally:
        distributed.destroy_process_group()
