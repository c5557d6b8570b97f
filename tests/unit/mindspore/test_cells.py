"""MindSpore's plain cells behave as MindSpore documents."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import (
    DynamicLossScaleUpdateCell,
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
    WithLossCell,
)
from support.small_networks import Classifier, LinearProbe, labelled_batches
from support.training_state import assert_unchanged, training_state

NAN, INF = float("nan"), float("inf")


def probe_with(cell_type, *arguments, **keywords):
    """Return a cell with SGD at rate 1 around a linear probe, whose gradient equals its inputs."""
    network = LinearProbe()
    return cell_type(network, SGD(network.parameters(), lr=1.0), *arguments, **keywords)


class TestWithLossCell:
    def test_it_is_the_loss_of_the_backbones_output(self):
        """The cell returns ``loss_fn(backbone(data), label)`` and has the backbone's parameters."""
        backbone, [(inputs, labels)] = nn.Linear(8, 4), labelled_batches(1)
        network = WithLossCell(backbone, nn.CrossEntropyLoss())

        loss = network(inputs, labels)

        assert torch.equal(loss, nn.functional.cross_entropy(backbone(inputs), labels))
        assert network.backbone_network is backbone
        assert len(list(network.parameters())) == 2


class TestTrainOneStepCell:
    @pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
    def test_it_is_a_plain_step(self, fused):
        """Loss and weights are bitwise equal to those of a plain training loop."""
        network = Classifier()
        reference = copy.deepcopy(network)
        cell = TrainOneStepCell(network, AdamW(network.parameters(), fused=fused))
        plain = AdamW(reference.parameters(), fused=fused)

        for batch in labelled_batches(3):
            loss = cell(*batch)
            expected = reference(*batch)
            expected.backward()
            plain.step()
            plain.zero_grad()
            assert torch.equal(loss, expected)
            assert not loss.requires_grad

        for ours, theirs in zip(network.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    def test_sens_multiplies_the_gradients_and_stays_in_them(self):
        """`sens` multiplies the gradients and therefore the update."""
        cell = probe_with(TrainOneStepCell, sens=4.0)

        loss = cell(torch.tensor([[3.0, 4.0]]))

        assert cell.network.weight.tolist() == [-12.0, -16.0]
        assert loss.item() == 0.0

    def test_return_grad_returns_the_gradients_by_name(self):
        """The cell returns the gradients times `sens`; a later step does not change them."""
        cell = probe_with(TrainOneStepCell, 4.0, return_grad=True)

        _, gradients = cell(torch.tensor([[3.0, 4.0]]))
        cell(torch.tensor([[5.0, 6.0]]))

        assert {name: gradient.tolist() for name, gradient in gradients.items()} == {
            "weight": [12.0, 16.0]
        }

    def test_the_schedule_follows_every_update(self):
        """Each call steps the schedule after the optimizer."""
        network = LinearProbe()
        optimizer = SGD(network.parameters(), lr=1.0)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        cell = TrainOneStepCell(network, optimizer, lr_scheduler=schedule)

        rates = []
        for _ in range(3):
            rates.append(optimizer.param_groups[0]["lr"])
            cell(torch.tensor([[1.0, 1.0]]))

        assert rates == [1.0, 1 / 2, 1 / 3]

    def test_it_has_no_protection_from_overflow(self):
        """A NaN in a gradient reaches the weights."""
        cell = probe_with(TrainOneStepCell)

        cell(torch.tensor([[NAN, 1.0]]))

        assert cell.network.weight.isnan().tolist() == [True, False]

    def test_gradients_are_released(self):
        """Gradients from before the call are released and do not enter the update."""
        cell = probe_with(TrainOneStepCell)
        cell.network.weight.grad = torch.full((2,), 100.0)

        cell(torch.tensor([[3.0, 4.0]]))

        assert cell.network.weight.tolist() == [-3.0, -4.0]
        assert cell.network.weight.grad is None

    @pytest.mark.parametrize(
        ("sens", "error"), [(0, ValueError), (0.0, ValueError), ("1", TypeError)], ids=repr
    )
    def test_sens_is_a_number_that_is_not_zero(self, sens, error):
        """A `sens` that is zero or not a number raises an error."""
        with pytest.raises(error, match="`sens` must"):
            probe_with(TrainOneStepCell, sens=sens)


class Net(nn.Module):
    """The network of MindSpore's documentation: a matrix product with weights of ones."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(in_features, out_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def documented_cell(scale_sense) -> TrainOneStepWithLossScaleCell:
    """Return the training cell of MindSpore's documentation."""
    net = Net(16, 10)
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    return TrainOneStepWithLossScaleCell(
        WithLossCell(net, nn.MSELoss()), optimizer, scale_sense=scale_sense
    )


class TestTrainOneStepWithLossScaleCell:
    def test_mindspores_first_example(self):
        """An update cell gives the documented loss, overflow flag, scale and update."""
        cell = documented_cell(
            DynamicLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=1000)
        )

        # The documentation's labels have shape (10,), which broadcasts to the outputs' shape.
        loss, overflow, loss_scale = cell(torch.ones(10, 16), torch.ones(10, 10))

        # All outputs are 16 and all labels are 1, so the loss is 15^2. Each weight contributes to
        # 10 of the 100 outputs, so its gradient is 2 * 15 * 10 / 100.
        assert loss.item() == 225.0
        assert not overflow.item()
        assert loss_scale.item() == 4096.0
        expected = torch.full((16, 10), 1 - 0.1 * 2 * 15 * 10 / 100)
        torch.testing.assert_close(cell.network.backbone.weight.detach(), expected)

    def test_mindspores_second_example(self):
        """A scale of float32's largest number overflows, and no weight is updated."""
        cell = documented_cell(torch.full((1,), torch.finfo(torch.float32).max))

        loss, overflow, loss_scale = cell(torch.ones(16, 16), torch.zeros(16, 10))

        assert loss.item() == 256.0
        assert overflow.item()
        assert loss_scale.item() == torch.finfo(torch.float32).max
        assert torch.equal(cell.network.backbone.weight, torch.ones(16, 10))

    def test_a_state_settles_the_last_update_and_loading_drops_it(self):
        """Saving steps the schedule for a pending update; loading discards a pending update."""
        network, [batch] = Classifier(), labelled_batches(1)
        optimizer = SGD(network.parameters(), lr=0.1)
        schedule = LambdaLR(optimizer, lambda step: 0.5**step)
        cell = TrainOneStepWithLossScaleCell(
            network, optimizer, torch.tensor(4.0), lr_scheduler=schedule
        )
        parts = (cell, optimizer, schedule)
        saved = copy.deepcopy([part.state_dict() for part in parts])

        cell(*batch)
        assert schedule.last_epoch == 0
        cell.state_dict()
        assert schedule.last_epoch == 1

        cell(*batch)
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)
        cell(*batch)
        assert cell.last_report.output.learning_rate.item() == pytest.approx(0.1)

    def test_the_output_is_three_scalars(self):
        """The output holds loss, overflow and loss scale, each of shape ``()``."""
        output = documented_cell(torch.tensor([8.0]))(torch.ones(2, 16), torch.ones(2, 10))

        assert output._fields == ("loss", "overflow", "loss_scale")
        assert [(value.dtype, value.shape) for value in output] == [
            (torch.float32, ()),
            (torch.bool, ()),
            (torch.float32, ()),
        ]

    def test_named_losses_are_reported(self):
        """The report has each loss of a network that returns several."""

        class Losses(LinearProbe):
            def forward(self, inputs: Tensor) -> dict[str, Tensor]:
                return {"lm_loss": super().forward(inputs), "mtp_loss": torch.full((), 2.0)}

        network = Losses()
        optimizer = SGD(network.parameters(), lr=1.0)
        cell = TrainOneStepWithLossScaleCell(network, optimizer, torch.tensor(8.0))
        output = cell(torch.tensor([[3.0, 4.0]]))

        assert output.loss.item() == 2.0
        losses = cell.last_report.losses
        assert {name: loss.item() for name, loss in losses.items()} == {
            "lm_loss": 0.0,
            "mtp_loss": 2.0,
        }

    @pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
    @pytest.mark.parametrize("value", [NAN, INF], ids=str)
    def test_an_overflow_changes_nothing_but_the_scale(self, value, fused):
        """An overflow lowers the scale and leaves all other training state unchanged."""
        network = LinearProbe()
        optimizer = AdamW(network.parameters(), fused=fused)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        cell = TrainOneStepWithLossScaleCell(
            network,
            optimizer,
            DynamicLossScaleUpdateCell(1024.0, 2, 2),
            lr_scheduler=schedule,
        )
        cell(torch.tensor([[3.0, 4.0]]))
        cell.flush()
        before = training_state(network, optimizer, schedule)

        output = cell(torch.tensor([[value, 4.0]]))
        cell.flush()

        assert output.overflow.item()
        assert output.loss_scale.item() == 512.0
        assert_unchanged(before, training_state(network, optimizer, schedule))
        assert network.weight.grad is None

    def test_the_scale_is_taken_out_of_the_update(self):
        """The loss scale does not change the update."""
        cell = probe_with(TrainOneStepWithLossScaleCell, torch.tensor(2.0**16))

        cell(torch.tensor([[3.0, 4.0]]))

        assert cell.network.weight.tolist() == [-3.0, -4.0]

    def test_set_sense_scale_holds_from_the_next_step_on(self):
        """The next step uses and returns the scale that was set."""
        cell = probe_with(TrainOneStepWithLossScaleCell, torch.tensor([16.0]))

        cell.set_sense_scale(torch.tensor([64.0]))

        assert cell(torch.tensor([[3.0, 4.0]])).loss_scale.item() == 64.0
        assert cell.network.weight.tolist() == [-3.0, -4.0]

    def test_a_step_may_assign_its_scale(self):
        """Assigning ``scale_sense`` replaces the scale, as it does for a parameter of MindSpore."""
        cell = probe_with(TrainOneStepWithLossScaleCell, torch.tensor(16.0))

        cell.scale_sense = torch.tensor([64.0])

        assert cell(torch.tensor([[3.0, 4.0]])).loss_scale.item() == 64.0

    @pytest.mark.parametrize("scale_sense", [1.0, 1, "dynamic", nn.Identity(), None], ids=str)
    def test_a_scale_that_is_neither_tensor_nor_cell_is_a_type_error(self, scale_sense):
        """A scale that is neither a tensor nor an update cell raises a TypeError."""
        with pytest.raises(TypeError, match="`scale_sense` must be a tensor or a loss-scale up"):
            probe_with(TrainOneStepWithLossScaleCell, scale_sense)

    @pytest.mark.parametrize("shape", [(2,), (1, 1)], ids=str)
    def test_a_scale_of_another_shape_is_a_value_error(self, shape):
        """A scale whose shape is neither ``()`` nor ``(1,)`` raises a ValueError."""
        with pytest.raises(ValueError, match="`scale_sense` must have shape"):
            probe_with(TrainOneStepWithLossScaleCell, torch.ones(shape))
