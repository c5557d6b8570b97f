"""`Muon` is torch's Muon with a skip; `hidden_matrices` returns the weights it is meant for."""

import copy

import pytest
import torch
from torch import nn

from mfwrap.optimizers import Muon, hidden_matrices

SETTINGS = [
    {},
    {"lr": 0.02, "nesterov": False, "weight_decay": 0.0},
    {"momentum": 0.8, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrices(dtype=torch.float32):
    """Return matrices of three shapes, with the same values at every call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (4, 6), (5, 5)]
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give(parameters, step, factor=1.0):
    """Set the gradients of a step, multiplied by a factor; the last matrix gets none at step 0."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient * factor
    if step == 0:
        parameters[-1].grad = None


def assert_same(ours, theirs):
    """Compare the weights and states of two optimizers, bit by bit."""
    for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        torch.testing.assert_close(mine["params"], other["params"], rtol=0, atol=0)
    torch.testing.assert_close(
        ours.state_dict()["state"], theirs.state_dict()["state"], rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=["defaults", "plain", "other"])
def test_it_equals_torchs_muon(settings, dtype):
    """With or without a scale, and beside skipped steps, weights and states are torch's."""
    parameters, plain = matrices(dtype), matrices(dtype)
    ours, theirs = Muon(parameters, **settings), torch.optim.Muon(plain, **settings)
    for step in range(4):
        ours.found_inf = torch.ones(())
        give(parameters, 0, torch.nan)
        ours.step()
        ours.found_inf = torch.zeros(())
        ours.grad_scale = torch.tensor(4.0 if step % 2 else 1.0)
        give(parameters, step, ours.grad_scale.item())
        give(plain, step)
        ours.step()
        theirs.step()
        del ours.grad_scale
        if step == 1:  # the skipped step has given a momentum to each matrix with a gradient
            assert_same(ours, theirs)
    assert_same(ours, theirs)


def test_a_half_precision_gradient_takes_any_scale():
    """A scale above the largest float16 number divides float16 gradients as it does in float32."""
    parameters, plain = matrices(torch.float16), matrices(torch.float16)
    ours, theirs = Muon(parameters), torch.optim.Muon(plain)
    ours.grad_scale = torch.tensor(2.0**17)
    give(parameters, 1, 2.0**12)
    give(plain, 1, 2.0**-5)
    ours.step()
    theirs.step()
    assert_same(ours, theirs)


def test_a_state_moves_between_the_two_classes():
    """A state of torch's Muon is loaded and continued, and the other way; copies continue, too."""
    parameters, plain = matrices(), matrices()
    ours, theirs = Muon(parameters, lr=0.02), torch.optim.Muon(plain, lr=0.01)
    for step in (1, 2):
        give(plain, step)
        theirs.step()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for mine, other in zip(parameters, plain, strict=True):
        mine.data.copy_(other.data)
    copied = copy.deepcopy(ours)
    back = torch.optim.Muon(matrices())
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    copies = [p for group in copied.param_groups for p in group["params"]]
    for each, optimizer in ((parameters, ours), (plain, theirs), (copies, copied)):
        give(each, 3)
        optimizer.step()
    assert_same(ours, theirs)
    assert_same(copied, theirs)
    assert back.param_groups[0]["lr"] == 0.01


def test_torchs_scaler_skips_and_unscales_it():
    """Torch's GradScaler reads nothing to decide; the weights are those of torch's Muon."""
    parameters, plain = matrices(), matrices()
    ours, theirs = Muon(parameters), torch.optim.Muon(plain)
    for optimizer, weights in ((ours, parameters), (theirs, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(1, 5):
            scaler.scale(torch.zeros(()))
            give(weights, step, torch.inf if step == 2 else scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    assert_same(ours, theirs)


class OwnStep(Muon):
    """A user's Muon with a step of its own, which divides by no scale."""

    def step(self, closure=None):
        """Subtract the gradients."""
        del closure
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad)


def test_torchs_scaler_unscales_for_a_step_of_the_users_own():
    """A subclass with another step gets unscaled gradients, and none where they overflow."""
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = OwnStep([parameter])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    parameter.grad = torch.full((2, 2), 512.0)
    scaler.step(optimizer)

    assert torch.equal(parameter, torch.full((2, 2), 0.5))


def test_what_torchs_muon_refuses():
    """Complex matrices and sparse gradients are refused, and nothing changes."""
    complex_one = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    complex_one.grad = torch.ones_like(complex_one)
    with pytest.raises(RuntimeError, match="does not support complex parameters"):
        Muon([complex_one]).step()
    sparse = nn.Parameter(torch.ones(2, 2))
    sparse.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        Muon([sparse]).step()


def test_a_closure_computes_the_gradients():
    """The result of the closure is returned, and its gradients are used."""
    parameters, plain = matrices(), matrices()
    give(plain, 1)
    torch.optim.Muon(plain).step()
    ours = Muon(parameters)

    def closure():
        assert torch.is_grad_enabled()
        give(parameters, 1)
        return 3.0

    assert ours.step(closure) == 3.0
    torch.testing.assert_close(parameters, plain, rtol=0, atol=0)


class WithHead(nn.Module):
    """A model with embeddings, matrices and a head, like those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.hidden = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.head = nn.Linear(4, 9)

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer that computes logits."""
        return self.head


def test_embeddings_biases_and_frozen_weights_are_left_out():
    """Only trainable matrices between the embeddings are returned, also inside a wrapper."""
    network = WithHead()
    wrapped = nn.Sequential(network)

    assert list(hidden_matrices(network)) == ["hidden.weight"]
    assert list(hidden_matrices(wrapped)) == ["0.hidden.weight"]


def test_a_network_without_a_head():
    """All matrices of an ordinary network are returned; a layer returned as None does not count."""
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    network.get_output_embeddings = lambda: None

    assert list(hidden_matrices(network)) == ["0.weight", "1.weight"]
