"""`StepUpdate`: one update from present gradients, and what it keeps between updates."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mfwrap import StepConfig
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.parameters import TrainedParameters, network_parameters
from mfwrap.step.update import StepUpdate

CPU = torch.device("cpu")


def network_of(count=3):
    """Return a network of `count` layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


class Run:
    """An update of a network with AdamW, and the same network with plain torch.

    Args:
        settings: Settings of the step.
    """

    def __init__(self, **settings):
        self.network, self.plain = network_of(), network_of()
        self.optimizer, self.plain_optimizer = (
            torch.optim.AdamW(each.parameters(), 0.1, fused=True)
            for each in (self.network, self.plain)
        )
        self.update = StepUpdate(
            self.parameters(), self.optimizer, StepConfig(**settings), LossScale(1.0, CPU)
        )

    def parameters(self):
        return TrainedParameters(network_parameters(self.network), self.optimizer, None)

    def backward(self, seed):
        """Compute the gradients of both networks from the same batch."""
        torch.manual_seed(seed)
        batch = torch.randn(5, 4)
        for network in (self.network, self.plain):
            network(batch).square().mean().backward()

    def step(self, seed):
        """Do one update of both networks, and return the report."""
        self.backward(seed)
        report = self.update(torch.zeros(()))
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        return report

    def assert_equal(self):
        for ours, torchs in zip(self.network.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(ours, torchs, rtol=0, atol=0)


def test_parameters_that_are_frozen_and_freed_are_followed():
    """Weights and norms are those of plain torch when parameters are frozen between updates."""
    run = Run(local_norm=True)
    for seed, frozen in enumerate([(), (1,), (0, 1), (), (2,)]):
        for network in (run.network, run.plain):
            for index, layer in enumerate(network):
                layer.requires_grad_(index not in frozen)
        report = run.step(seed)

        assert len(report.local_norm_names) == 2 * (3 - len(frozen))
        assert report.output.local_norm.isfinite().all()
    run.assert_equal()


def test_weights_may_change_their_dtype_between_updates():
    """A network that is converted after an update has the norms of its new gradients."""
    run = Run(use_clip_grad=True, max_grad_norm=1e9)
    first = run.step(0).output.global_norm
    run.network.double()
    for state in run.optimizer.state.values():
        state.update({name: state[name].double() for name in ("exp_avg", "exp_avg_sq")})
    batch = torch.randn(5, 4, dtype=torch.float64)
    run.network(batch).square().mean().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in run.network.parameters()])

    second = run.update(torch.zeros(())).output.global_norm

    assert first.isfinite()
    torch.testing.assert_close(second.double(), expected, rtol=1e-6, atol=0)


def test_replaced_parameters_are_read_and_updated():
    """An update whose parameters are replaced reads and updates the new ones."""
    run = Run(local_norm=True)
    run.step(0)
    for network, optimizer in ((run.network, run.optimizer), (run.plain, run.plain_optimizer)):
        torch.manual_seed(9)
        network.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": network[-1].parameters()})
    run.backward(1)
    with pytest.raises(RuntimeError, match="must hold the same 6 parameters"):
        run.update.measure()
    run.update.replace_parameters(run.parameters(), None, None)

    report = run.update(torch.zeros(()))

    run.plain_optimizer.step()
    assert len(report.local_norm_names) == 8
    run.assert_equal()


def test_an_error_releases_the_gradients():
    """The gradients of an update that has failed are not added to those of the next."""
    run = Run()
    run.backward(0)
    run.optimizer.param_groups[0]["lr"] = float("nan")

    with pytest.raises(ValueError, match="learning rate of parameter group 0 must be finite"):
        run.update(torch.zeros(()))
    assert all(parameter.grad is None for parameter in run.network.parameters())


class _Operators(TorchDispatchMode):
    """Count the operators that are called, apart from views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("settings", "most"), [({}, 35), ({"use_clip_grad": True, "local_norm": True}, 45)]
)
def test_the_number_of_operators_does_not_depend_on_the_number_of_parameters(settings, most):
    """An update calls few operators, and no more of them for more layers.

    On a GPU each of them takes the host about as long as ten small ones take the device.
    """
    counts = []
    for layers in (3, 30):
        network = network_of(layers)
        optimizer = torch.optim.AdamW(network.parameters(), 0.1, fused=True)
        parameters = TrainedParameters(network_parameters(network), optimizer, None)
        update = StepUpdate(parameters, optimizer, StepConfig(**settings), LossScale(1.0, CPU))
        for _ in range(2):
            network(torch.ones(5, 4)).mean().backward()
            with _Operators() as operators:
                update(torch.zeros(()))
        counts.append(operators.count)

    assert counts[0] == counts[1] <= most
