"""Steps that users build from the parts of MindSpore's cells."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    FixedLossScaleUpdateCell,
    MFTrainOneStepCell,
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
)
from support.host_reads import HostReads
from support.own_steps import (
    AccumulatingStep,
    AdversarialStep,
    GuidesStep,
    OverflowCheckedStep,
    TupleStep,
)
from support.small_networks import Classifier, LinearProbe, labelled_batches

NAN, INF = float("nan"), float("inf")


def probe_with(cell_type, *arguments, **keywords):
    """Return a cell with SGD at rate 1 around a linear probe, whose gradient equals its inputs."""
    network = LinearProbe()
    return cell_type(network, SGD(network.parameters(), lr=1.0), *arguments, **keywords)


class TestStepParts:
    @pytest.mark.parametrize("sens", [1.0, 4.0])
    @pytest.mark.parametrize("optimizer", [SGD, Adam], ids=["SGD", "Adam"])
    def test_a_documented_step_trains_like_the_cell(self, optimizer, sens):
        """A subclass with MindSpore's lines gives the cell's losses and weights, bit by bit."""
        network = Classifier()
        cells = [
            kind(own := copy.deepcopy(network), optimizer(own.parameters(), lr=0.1), sens)
            for kind in (TrainOneStepCell, GuidesStep)
        ]

        for batch in labelled_batches(4):
            whole, own = (cell(*batch) for cell in cells)
            assert torch.equal(own, whole)

        for ours, theirs in zip(*(cell.network.parameters() for cell in cells), strict=True):
            assert torch.equal(ours, theirs)

    def test_hyper_map_keeps_the_structure(self):
        """It maps a function of one or several arguments over nested tuples and lists."""
        cell = probe_with(TrainOneStepCell)
        nested = (torch.ones(2), [torch.full((1,), 2.0)])

        first, [second] = cell.hyper_map(lambda one, other: one + 10 * other, nested, nested)
        assert (first.tolist(), second.tolist()) == ([11.0, 11.0], [22.0])
        assert cell.hyper_map(torch.neg, (torch.ones(1),)) == (-torch.ones(1),)

    def test_a_step_may_have_a_map_of_its_own(self):
        """MindSpore's wrappers set `hyper_map` themselves."""
        cell = probe_with(TrainOneStepCell)
        cell.hyper_map = map
        assert cell.hyper_map is map

    def test_a_documented_step_reads_nothing_on_the_host(self):
        """With a fused optimizer, a step with MindSpore's lines does not synchronize."""
        network, batches = Classifier(), labelled_batches(3)
        cell = GuidesStep(network, Adam(network.parameters(), fused=True))
        cell(*batches[0])

        with HostReads() as reads:
            for batch in batches[1:]:
                cell(*batch)

        assert reads.reads == []

    def test_the_attributes_have_mindspores_defaults(self):
        """`sens` is 1.0, and there are no ranks to average over."""
        cell = probe_with(TrainOneStepCell)

        assert cell.sens == probe_with(TrainOneStepCell, None).sens == 1.0
        assert cell.reducer_flag is False
        assert [*cell.weights] == [cell.network.weight]

    def test_schedule_and_average_follow_an_update(self):
        """``apply_gradients`` steps the schedule, updates the average and releases gradients."""
        network = LinearProbe()
        optimizer = SGD(network.parameters(), lr=1.0)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        ema = ExponentialMovingAverage(network, decay=0.5)
        cell = MFTrainOneStepCell(network, optimizer, lr_scheduler=schedule, ema=ema)

        cell.apply_gradients([torch.tensor([4.0, 8.0])])

        assert network.weight.tolist() == [-4.0, -8.0]
        assert network.weight.grad is None
        assert schedule.get_last_lr() == [0.5]
        with ema.swap():
            assert network.weight.tolist() == [-2.0, -4.0]

    @pytest.mark.parametrize("own", [True, "average", None], ids=repr)
    def test_a_subclass_may_have_an_average_of_its_own(self, own):
        """``apply_gradients`` leaves ``ema`` and ``lr_scheduler`` of a subclass alone."""
        updates = []

        class Average:
            def update(self):
                updates.append(1)

            step = update

        class Own(GuidesStep):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                self.ema = self.lr_scheduler = Average() if own == "average" else own

        network = LinearProbe()
        cell = Own(network, SGD(network.parameters(), lr=1.0))
        cell(torch.tensor([4.0, 8.0]))

        assert network.weight.tolist() == [-4.0, -8.0]
        assert updates == []

    @pytest.mark.parametrize(
        "kind", [TrainOneStepCell, TrainOneStepWithLossScaleCell, MFTrainOneStepCell]
    )
    def test_a_subclass_may_have_any_attributes_of_its_own(self, kind):
        """The cells read none that a subclass can name, but those that MindSpore's have."""
        of_mindspore = {"network", "optimizer", "weights", "grad", "grad_reducer", "reducer_flag"}
        of_mindspore |= {"sens", "return_grad"}

        def settings(network):
            schedule = LambdaLR(SGD(network.parameters(), lr=1.0), lambda n: 1 / (1 + n))
            more = (
                {} if kind is not MFTrainOneStepCell else {"ema": ExponentialMovingAverage(network)}
            )
            scale = [torch.tensor(4.0)] if kind is TrainOneStepWithLossScaleCell else []
            return (network, schedule.optimizer, *scale), {"lr_scheduler": schedule, **more}

        class Own(kind):
            """Has attributes of its own under all names that the class does not reserve."""

            def __init__(self, *arguments, **keywords):
                super().__init__(*arguments, **keywords)
                for name in {*vars(self), "flush", "step"} - of_mindspore:
                    if "__" not in name:
                        setattr(self, name, "own")

        names = {name for each in kind.__mro__ for name in vars(each)}
        for name in names:
            if name.startswith("_") and "__" not in name:
                setattr(Own, name, "own")
        states = []
        for each in (kind, Own):
            network = LinearProbe()
            arguments, keywords = settings(network)
            cell = each(*arguments, **keywords)
            for inputs in ([4.0, 8.0], [1.0, 3.0]):
                cell(torch.tensor(inputs))
            cell.apply_gradients([torch.tensor([1.0, 2.0])])
            if kind is not TrainOneStepCell:
                cell.set_sense_scale(torch.tensor(2.0))
                cell.process_loss_scale(cell.get_overflow_status(None, [torch.ones(1)]))
                cell.load_state_dict(cell.state_dict())
            states.append((network.weight.tolist(), keywords["lr_scheduler"].last_epoch))
        assert states[0] == states[1]

    def test_a_converted_network_is_refused_before_an_update(self):
        """``apply_gradients`` raises an error before it changes a weight."""
        network = LinearProbe()
        ema = ExponentialMovingAverage(network, decay=0.5)
        cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=1.0), ema=ema)
        network.double()

        with pytest.raises(RuntimeError, match="`ema` must match the network's weights"):
            cell.apply_gradients([torch.tensor([4.0, 8.0]).double()])
        assert network.weight.tolist() == [0.0, 0.0]

    def test_a_missing_gradient_is_refused(self):
        """``apply_gradients`` raises an error before it changes a weight."""
        cell = probe_with(TrainOneStepCell)

        with pytest.raises(ValueError, match="`grads` must hold one gradient per weight, 1, got 0"):
            cell.apply_gradients([])
        assert cell.network.weight.tolist() == [0.0, 0.0]

    def test_assigned_weights_are_updated_alone(self):
        """A step updates the weights that were assigned, and leaves the others unchanged."""
        network = Classifier()
        first, second = copy.deepcopy(network), copy.deepcopy(network)
        own = GuidesStep(first, SGD(first.parameters(), lr=0.1, momentum=0.9))
        own.weights = reversed(list(first.layers[2].parameters()))
        with pytest.warns(UserWarning, match="no optimizer"):
            whole = TrainOneStepCell(
                second, SGD(second.layers[2].parameters(), lr=0.1, momentum=0.9)
            )

        for batch in labelled_batches(3):
            own(*batch)
            whole(*batch)

        for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        with pytest.raises(ValueError, match="must be parameters of the cell's optimizer"):
            own.weights = second.parameters()

    @pytest.mark.parametrize("name", ["construct", "forward"])
    def test_a_step_by_another_name_is_refused(self, name):
        """A step that nothing would call is an error where its class is defined."""
        with pytest.raises(TypeError, match=rf"must be the method `__call__`, got Own\.{name}"):
            type("Own", (TrainOneStepCell,), {name: GuidesStep.__call__})
        type("Own", (TrainOneStepCell,), {name: id, "__call__": GuidesStep.__call__})

    def test_a_step_of_a_network_with_several_outputs(self):
        """A `sens` for each output differentiates the loss alone."""
        network = Classifier()
        own, whole = (copy.deepcopy(network) for _ in range(2))

        class Outputs(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = own

            def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
                return self.network(inputs, labels), self.network.layers(inputs)

        cells = [
            TupleStep(Outputs(), SGD(own.parameters(), lr=0.1), 4.0),
            TrainOneStepCell(whole, SGD(whole.parameters(), lr=0.1), 4.0),
        ]
        for batch in labelled_batches(3):
            assert torch.equal(*(cell(*batch) for cell in cells))
        for ours, theirs in zip(own.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)

    def test_a_step_that_accumulates(self):
        """Two calls of an accumulating step equal one call of the cell with two micro-batches."""
        network = Classifier()
        own, whole = (copy.deepcopy(network) for _ in range(2))
        step = AccumulatingStep(own, SGD(own.parameters(), lr=0.1))
        cell = MFTrainOneStepCell(whole, SGD(whole.parameters(), lr=0.1))

        batches = labelled_batches(4)
        for batch in batches:
            step(*batch)
        for pair in (batches[:2], batches[2:]):
            cell.step(pair)

        for ours, theirs in zip(own.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)

    def test_a_step_of_two_networks(self):
        """The generator's gradients are those of the critic as its own cell has just updated it."""
        generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)

        class OfGenerator(nn.Module):
            sign = -1

            def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
                super().__init__()
                self.generator, self.critic = generator, critic

            def forward(self, noise: Tensor, real: Tensor) -> Tensor:
                fake = self.critic(self.generator(noise)).tanh().mean()
                return self.sign * fake + self.critic(real).tanh().mean()

        class OfCritic(OfGenerator):
            sign = 1

        own = copy.deepcopy((generator, critic))
        optimizers = [SGD(network.parameters(), lr=0.5) for network in own]
        with pytest.warns(UserWarning, match="no optimizer"):
            trains_critic = GuidesStep(OfCritic(*own), optimizers[1])
        with pytest.warns(UserWarning, match="no optimizer"):
            step = AdversarialStep(OfGenerator(*own), optimizers[0], trains_critic)
        batch = torch.randn(4, 2), torch.randn(4, 3)
        for _ in range(3):
            step(*batch)
            for network, loss in ((critic, OfCritic), (generator, OfGenerator)):
                gradients = torch.autograd.grad(
                    loss(generator, critic)(*batch), list(network.parameters())
                )
                with torch.no_grad():
                    for weight, gradient in zip(network.parameters(), gradients, strict=True):
                        weight.sub_(gradient, alpha=0.5)

        for ours, theirs in zip(own, (generator, critic), strict=True):
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


class TestSeams:
    def test_an_overflow_check_starts_with_what_it_was_given(self):
        """``start_overflow_check`` returns False and its second argument."""
        cell = probe_with(TrainOneStepWithLossScaleCell, torch.tensor(2.0))
        compute_input = object()

        assert cell.start_overflow_check(torch.ones(()), compute_input) == (False, compute_input)

    @pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_one_element_is_an_overflow(self, dtype, value):
        """One non-finite element in a tensor, sequence or mapping is an overflow."""
        cell = probe_with(TrainOneStepWithLossScaleCell, torch.tensor(2.0))
        good, bad = torch.full((3,), 6e4, dtype=dtype), torch.zeros(3, dtype=dtype)
        bad[1] = value

        for holder in (bad, (good, bad), [good, [good, (bad,)]], {"a": good, "b": bad}):
            overflow = cell.get_overflow_status(False, holder)  # noqa: FBT003  (MindSpore's signature)
            assert overflow.dtype == torch.bool
            assert overflow.shape == ()
            assert overflow.item()
        assert not cell.get_overflow_status(False, (good, good, [])).item()  # noqa: FBT003  (MindSpore's signature)

    @pytest.mark.parametrize("value", [3.0, "ab", ["ab"]], ids=repr)
    def test_what_holds_no_tensors_is_refused(self, value):
        """A number or text as `compute_output` raises a TypeError that names the argument."""
        cell = probe_with(TrainOneStepWithLossScaleCell, torch.tensor(2.0))

        with pytest.raises(TypeError, match="`compute_output` must hold tensors"):
            cell.get_overflow_status(False, value)  # noqa: FBT003  (MindSpore's signature)

    def test_the_update_cell_is_an_attribute(self):
        """A step of one's own may call it as MindSpore's do; a fixed scale has none."""
        manager = DynamicLossScaleUpdateCell(1024.0, 2, 100)
        cell = probe_with(TrainOneStepWithLossScaleCell, manager)
        overflow = cell.loss_scaling_manager(cell.scale_sense, torch.tensor(data=True))

        assert cell.loss_scaling_manager is manager
        assert overflow.item()
        assert cell.scale_sense.item() == 512
        fixed = probe_with(TrainOneStepWithLossScaleCell, torch.tensor(8.0))
        assert fixed.loss_scaling_manager is None

    def test_process_loss_scale_changes_the_scale_and_returns_the_flag(self):
        """``process_loss_scale`` updates the scale by its rule and returns the flag."""
        dynamic = probe_with(
            TrainOneStepWithLossScaleCell, DynamicLossScaleUpdateCell(1024.0, 2, 2)
        )
        fixed = probe_with(TrainOneStepWithLossScaleCell, FixedLossScaleUpdateCell(1024.0))
        flag = torch.full((), True)  # noqa: FBT003  (torch's signature)

        assert dynamic.process_loss_scale(flag) is flag
        assert dynamic.process_loss_scale(True).item()  # noqa: FBT003  (MindSpore's signature)
        with pytest.raises(TypeError, match="`overflow` must be a bool"):
            dynamic.process_loss_scale(1)
        assert fixed.process_loss_scale(flag) is flag
        assert (dynamic.scale_sense.item(), fixed.scale_sense.item()) == (256.0, 1024.0)

    def test_an_overflow_checked_step_trains_like_the_cell(self):
        """A step built from the documented methods trains like the cell."""
        network = Classifier()
        steps = [
            cell_type(
                own_network := copy.deepcopy(network),
                SGD(own_network.parameters(), lr=0.1),
                DynamicLossScaleUpdateCell(1024.0, 2, 2),
            )
            for cell_type in (TrainOneStepWithLossScaleCell, OverflowCheckedStep)
        ]

        for batch, factor in zip(labelled_batches(6), (1, NAN, 1, 1, INF, 1), strict=True):
            whole, own = (step(*batch, torch.full((), factor)) for step in steps)
            torch.testing.assert_close(tuple(own), tuple(whole), rtol=0, atol=0, equal_nan=True)

        for ours, theirs in zip(*(step.network.parameters() for step in steps), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
