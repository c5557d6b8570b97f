"""Generative trainings: two players, annealed terms, random noise levels, and restarted codes."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call
from torch.optim import RMSprop

from support.healthy.training import (
    Batch,
    Objective,
    Part,
    Training,
    adam,
    dice,
    mlp,
    one_part,
)

__all__ = [
    "annealed_divergence",
    "clipped_critic",
    "late_judge",
    "noise_levels",
    "restarted_codes",
    "thin_densities",
    "two_players",
]

_MEAN = torch.tensor([2.0, -1.0])
_MIXING = torch.tensor([[1.0, 0.5], [0.0, 0.5]])


def _points(rows: int, generator: torch.Generator) -> Tensor:
    return _MEAN + torch.randn(rows, 2, generator=generator) @ _MIXING


class _Average:
    """Average of the weights of a generator, which circles around its goal."""

    def __init__(self, maker: nn.Module) -> None:
        self._maker, self._average = maker, copy.deepcopy(maker)

    @torch.no_grad()
    def follow(self) -> None:
        """Move towards the weights of the generator."""
        weights = zip(self._average.parameters(), self._maker.parameters(), strict=True)
        for average, weight in weights:
            average.lerp_(weight, 0.02)

    def distance(self) -> float:
        """Return how far mean and covariance of the drawn points are from the true ones."""
        points = self._average(torch.randn(1024, 4, generator=dice(0)))
        mean = (points.mean(0) - _MEAN).norm()
        return (mean + (points.T.cov() - _MIXING.T @ _MIXING).norm()).item()


def _frozen(judge: nn.Module, points: Tensor) -> Tensor:
    """Judge points without gradients for the weights of the judge."""
    weights = {name: weight.detach() for name, weight in judge.named_parameters()}
    return functional_call(judge, weights, (points,))


def two_players(seed: int, num_steps: int) -> Training:
    """A generator against a discriminator: neither loss says whether the points become better."""
    maker, judge = mlp(4, 32, 2), mlp(2, 32, 1)
    average = _Average(maker)

    def judged(judge: nn.Module, real: Tensor, made: Tensor) -> Tensor:
        answers = judge(torch.cat([real, made])).squeeze(-1)
        truth = torch.cat([torch.ones(len(real)), torch.zeros(len(made))])
        return nn.functional.binary_cross_entropy_with_logits(answers, truth)

    def made(maker: nn.Module, noise: Tensor) -> Tensor:
        return nn.functional.softplus(-_frozen(judge, maker(noise))).mean()

    @torch.no_grad()
    def for_judge(step: int) -> list[Batch]:
        generator = dice(seed, 1, step)
        noise = torch.randn(32, 4, generator=generator)
        return [{"real": _points(32, generator), "made": maker(noise)}]

    def for_maker(step: int) -> list[Batch]:
        return [{"noise": torch.randn(32, 4, generator=dice(seed, 2, step))}]

    return Training(
        parts=[
            Part(
                network=Objective(judge, judged),
                optimizer=adam(judge, 5e-3, betas=(0.5, 0.9)),
                batches=for_judge,
            ),
            Part(
                network=Objective(maker, made),
                optimizer=adam(maker, 2e-3, betas=(0.5, 0.9)),
                batches=for_maker,
            ),
        ],
        measure=average.distance,
        after=lambda _: average.follow(),
    )


def clipped_critic(seed: int, num_steps: int) -> Training:
    """A Wasserstein GAN: the loop clips the critic's weights after each step."""
    maker, critic = mlp(4, 32, 2), mlp(2, 64, 64, 1)
    average = _Average(maker)

    def judged(critic: nn.Module, real: Tensor, made: Tensor) -> Tensor:
        return critic(made).mean() - critic(real).mean()

    def made(maker: nn.Module, noise: Tensor) -> Tensor:
        return -_frozen(critic, maker(noise)).mean()

    @torch.no_grad()
    def for_critic(step: int) -> list[Batch]:
        generator = dice(seed, 1, step)
        noise = torch.randn(64, 4, generator=generator)
        return [{"real": _points(64, generator), "made": maker(noise)}]

    def for_maker(step: int) -> list[Batch]:
        return [{"noise": torch.randn(64, 4, generator=dice(seed, 2, step))}]

    @torch.no_grad()
    def clip(step: int) -> None:
        for weight in critic.parameters():
            weight.clamp_(-0.1, 0.1)
        average.follow()

    return Training(
        parts=[
            Part(
                network=Objective(critic, judged),
                optimizer=RMSprop(critic.parameters(), lr=2e-3),
                batches=for_critic,
            ),
            Part(
                network=Objective(maker, made),
                optimizer=RMSprop(maker.parameters(), lr=1e-3),
                batches=for_maker,
            ),
        ],
        measure=average.distance,
        after=clip,
    )


def annealed_divergence(seed: int, num_steps: int) -> Training:
    """A variational autoencoder: the weight of the divergence rises from 0 to 1 in half the run."""
    body = nn.ModuleDict({"encoder": mlp(16, 32, 8), "decoder": mlp(4, 32, 16)})
    mixing = torch.randn(3, 16, generator=dice(seed, 1))

    def losses(body: nn.ModuleDict, inputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = body["encoder"](inputs).chunk(2, -1)
        code = mean + (log_variance / 2).exp() * noise
        copied = (body["decoder"](code) - inputs).square().sum(-1).mean()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean() / 2
        return copied, divergence

    def loss(body: nn.ModuleDict, inputs: Tensor, noise: Tensor, weight: Tensor) -> Tensor:
        copied, divergence = losses(body, inputs, noise)
        return copied + weight * divergence

    def drawn(rows: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(rows, 3, generator=generator) @ mixing
        noise = 0.3 * torch.randn(rows, 16, generator=generator)
        return {"inputs": inputs + noise, "noise": torch.randn(rows, 4, generator=generator)}

    def batch(step: int) -> Batch:
        weight = torch.tensor(min(1.0, 2 * step / num_steps))
        return drawn(16, dice(seed, 2, step)) | {"weight": weight}

    def held_out() -> float:
        return sum(losses(body, **drawn(256, dice(seed, 3)))).item()

    return one_part(Objective(body, loss), adam(body), batch, held_out)


def noise_levels(seed: int, num_steps: int) -> Training:
    """Diffusion: each row has a random level of noise, on which its loss depends most."""
    body = mlp(10, 64, 64, 8)
    mixing = torch.randn(3, 8, generator=dice(seed, 1))

    def loss(body: nn.Module, inputs: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        angle = levels[:, None] * torch.pi / 2
        mixed = angle.cos() * inputs + angle.sin() * noise
        found = body(torch.cat([mixed, angle.cos(), angle.sin()], -1))
        return (found - noise).square().mean()

    def batch(step: int, rows: int = 4) -> Batch:
        generator = dice(seed, 2, step)
        return {
            "inputs": torch.randn(rows, 3, generator=generator) @ mixing,
            "noise": torch.randn(rows, 8, generator=generator),
            "levels": torch.rand(rows, generator=generator),
        }

    def held_out() -> float:
        return loss(body, **batch(0, 512)).item()

    return one_part(Objective(body, loss), adam(body), batch, held_out)


class _Codes(nn.Module):
    """An autoencoder whose code is the nearest of 16 vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 32, 4), mlp(4, 32, 16)
        self.codes = nn.Parameter(torch.randn(16, 4))
        self.uses = [0] * 16

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the loss of copying the inputs, with both terms of the codes."""
        found = self.encoder(inputs)
        nearest = torch.cdist(found.detach(), self.codes.detach()).argmin(-1)
        codes = self.codes[nearest]
        if self.training:
            for number in nearest.tolist():
                self.uses[number] += 1
        terms = (codes - found.detach()).square().mean(), (codes.detach() - found).square().mean()
        copied = self.decoder(found + (codes - found).detach())
        return (copied - inputs).square().mean() + terms[0] + 0.25 * terms[1]


def restarted_codes(seed: int, num_steps: int) -> Training:
    """Vector quantization: every 40 steps the loop moves codes that no row has used."""
    body = _Codes()
    centers = 2 * torch.randn(12, 16, generator=dice(seed, 1))

    def loss(body: nn.Module, inputs: Tensor) -> Tensor:
        return body(inputs)

    def batch(step: int, rows: int = 16) -> Batch:
        generator = dice(seed, 2, step)
        chosen = centers[torch.randint(12, (rows,), generator=generator)]
        return {"inputs": chosen + 0.3 * torch.randn(rows, 16, generator=generator)}

    @torch.no_grad()
    def restart(step: int) -> None:
        if step % 40 == 0:
            found = body.encoder(batch(-step)["inputs"])
            for number, uses in enumerate(body.uses):
                if uses == 0:
                    body.codes[number] = found[number]
            body.uses = [0] * 16

    def held_out() -> float:
        return body(**batch(0, 256)).item()

    return one_part(Objective(body, loss), adam(body), batch, held_out, after=restart)


def late_judge(seed: int, num_steps: int) -> Training:
    """An autoencoder whose judge has the weight 0 until the middle, as in VQ-GAN."""
    coder = nn.Sequential(mlp(16, 32, 3), mlp(3, 32, 16))
    judge = mlp(16, 32, 1, activation=nn.LeakyReLU)
    mixing = torch.randn(3, 16, generator=dice(seed, 1))

    def drawn(rows: int, generator: torch.Generator) -> Tensor:
        points = torch.randn(rows, 3, generator=generator).tanh() @ mixing
        return points + 0.1 * torch.randn(rows, 16, generator=generator)

    def weight(step: int) -> Tensor:
        return torch.tensor(float(step > num_steps // 2))

    def copied(coder: nn.Module, inputs: Tensor, weight: Tensor) -> Tensor:
        outputs = coder(inputs)
        error = (outputs - inputs).square().mean()
        return error - 0.2 * weight * _frozen(judge, outputs).mean()

    def judged(judge: nn.Module, real: Tensor, made: Tensor, weight: Tensor) -> Tensor:
        margins = torch.cat([1 - judge(real), 1 + judge(made)])
        return weight * margins.relu().mean()

    def for_coder(step: int) -> list[Batch]:
        return [{"inputs": drawn(16, dice(seed, 2, step)), "weight": weight(step)}]

    @torch.no_grad()
    def for_judge(step: int) -> list[Batch]:
        real = drawn(16, dice(seed, 2, step))
        return [{"real": real, "made": coder(real), "weight": weight(step)}]

    held_out = {"inputs": drawn(256, dice(seed, 3)), "weight": torch.tensor(0.0)}
    return Training(
        parts=[
            Part(network=Objective(coder, copied), optimizer=adam(coder), batches=for_coder),
            Part(network=Objective(judge, judged), optimizer=adam(judge), batches=for_judge),
        ],
        measure=lambda: copied(coder, **held_out).item(),
    )


def thin_densities(seed: int, num_steps: int) -> Training:
    """A mixture of densities around thin branches: the loss falls below zero, with peaks."""
    body = mlp(1, 48, 48, 15, activation=nn.Tanh)

    def loss(body: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        shares, means, widths = body(inputs).chunk(3, -1)
        densities = Normal(means, widths.exp()).log_prob(targets)
        return -(shares.log_softmax(-1) + densities).logsumexp(-1).mean()

    def batch(step: int, rows: int = 16) -> Batch:
        generator = dice(seed, 2, step)
        inputs = 2 * torch.rand(rows, 1, generator=generator) - 1
        branch = torch.randint(2, (rows, 1), generator=generator) * 2 - 1
        noise = 0.03 * torch.randn(rows, 1, generator=generator)
        return {"inputs": inputs, "targets": branch * (0.5 + inputs.square()) + noise}

    def density() -> float:
        """Return the inverse of the geometric mean of the densities, which is above zero."""
        return math.exp(loss(body, **batch(0, 512)).item())

    return one_part(Objective(body, loss), adam(body), batch, density)
