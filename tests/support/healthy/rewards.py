"""Rewards and preferences: losses that do not measure progress, and gradients that are rare."""

import copy

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from support.healthy.training import (
    Batch,
    Objective,
    Text,
    Training,
    adam,
    dice,
    mlp,
    one_part,
    small_gpt2,
)

__all__ = [
    "actor_and_critic",
    "group_advantages",
    "old_batches",
    "preference_pairs",
    "sparse_rewards",
    "target_network",
]

_PLACES = 10
"""Places of the chain; the last one has the reward."""


def sparse_rewards(seed: int, num_steps: int) -> Training:
    """REINFORCE with a lock of two moves: most batches have no reward, and no gradient."""
    contexts, moves = 4, 6
    right = torch.randint(moves, (contexts, 2), generator=dice(seed, 1))
    body = mlp(contexts, 32, 2 * moves)

    def loss(body: nn.Module, states: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        chances = body(states).view(-1, 2, moves).log_softmax(-1)
        taken = chances.gather(-1, actions[..., None]).squeeze(-1).sum(-1)
        return -(taken * rewards).mean()

    @torch.no_grad()
    def batch(step: int) -> Batch:
        generator = dice(seed, 2, step)
        context = torch.randint(contexts, (12,), generator=generator)
        states = nn.functional.one_hot(context, contexts).float()
        chances = body(states).view(-1, moves).softmax(-1)
        actions = torch.multinomial(chances, 1, generator=generator).view(-1, 2)
        rewards = (actions == right[context]).all(-1).float()
        return {"states": states, "actions": actions, "rewards": rewards}

    def failures() -> float:
        chances = body(torch.eye(contexts)).view(contexts, 2, moves).softmax(-1)
        return 1 - chances.gather(-1, right[..., None]).squeeze(-1).prod(-1).mean().item()

    return one_part(Objective(body, loss), adam(body, 1e-2), batch, failures)


def old_batches(seed: int, num_steps: int) -> Training:
    """Clipped policy gradients (PPO): eight steps on rows of a policy that is older and older."""
    contexts, actions = 8, 10
    rewards = torch.rand(contexts, actions, generator=dice(seed, 1))
    body = mlp(contexts, 32, actions + 1)
    kept: Batch = {}

    def loss(
        body: nn.Module,
        states: Tensor,
        actions: Tensor,
        chances: Tensor,
        advantages: Tensor,
        rewards: Tensor,
    ) -> Tensor:
        outputs = body(states)
        policy = Categorical(logits=outputs[:, :-1])
        ratio = (policy.log_prob(actions) - chances).exp()
        clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        value = (outputs[:, -1] - rewards).square().mean()
        return -clipped.mean() + 0.5 * value - 0.01 * policy.entropy().mean()

    @torch.no_grad()
    def batch(step: int) -> Batch:
        generator = dice(seed, 2, step)
        if (step - 1) % 8 == 0 or not kept:
            context = torch.randint(contexts, (128,), generator=generator)
            states = nn.functional.one_hot(context, contexts).float()
            outputs = body(states)
            policy = Categorical(logits=outputs[:, :-1])
            taken = torch.multinomial(policy.probs, 1, generator=generator).squeeze(-1)
            noise = 0.1 * torch.randn(128, generator=generator)
            reward = rewards[context, taken] + noise
            advantage = reward - outputs[:, -1]
            kept.update(
                states=states,
                actions=taken,
                chances=policy.log_prob(taken),
                advantages=(advantage - advantage.mean()) / advantage.std(),
                rewards=reward,
            )
        rows = torch.randint(128, (32,), generator=generator)
        return {name: values[rows] for name, values in kept.items()}

    def regret() -> float:
        chances = body(torch.eye(contexts))[:, :-1].softmax(-1)
        return (rewards.max(-1).values - (chances * rewards).sum(-1)).mean().item()

    return one_part(Objective(body, loss), adam(body), batch, regret)


def _moved(places: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next places of a chain, and the rewards: 1 at its end, which leads back."""
    moved = (places + 2 * actions - 1).clamp(min=0)
    rewards = (moved == _PLACES - 1).float()
    return torch.where(rewards > 0, 0, moved), rewards


def actor_and_critic(seed: int, num_steps: int) -> Training:
    """Advantages from a critic that learns at the same time, in a chain with one reward."""
    body = mlp(_PLACES, 32, 3)
    places = torch.randint(_PLACES - 1, (16,), generator=dice(seed, 1))

    def loss(body: nn.Module, states: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        outputs = body(states)
        policy = Categorical(logits=outputs[:, :2])
        advantages = returns - outputs[:, 2]
        gain = policy.log_prob(actions) * advantages.detach() + 0.01 * policy.entropy()
        return advantages.square().mean() - gain.mean()

    @torch.no_grad()
    def batch(step: int) -> Batch:
        generator = dice(seed, 2, step)
        states, actions, rewards = [], [], []
        for _ in range(5):
            states.append(nn.functional.one_hot(places, _PLACES).float())
            chances = body(states[-1])[:, :2].softmax(-1)
            actions.append(torch.multinomial(chances, 1, generator=generator).squeeze(-1))
            moved, reward = _moved(places, actions[-1])
            places.copy_(moved)
            rewards.append(reward)
        value = body(nn.functional.one_hot(places, _PLACES).float())[:, 2]
        returns: list[Tensor] = []
        for reward in reversed(rewards):
            value = reward + 0.9 * value * (1 - reward)
            returns.insert(0, value)
        return {
            "states": torch.cat(states),
            "actions": torch.cat(actions),
            "returns": torch.cat(returns),
        }

    def wrong_moves() -> float:
        return body(torch.eye(_PLACES)[:-1])[:, :2].softmax(-1)[:, 0].mean().item()

    return one_part(Objective(body, loss), adam(body), batch, wrong_moves)


def target_network(seed: int, num_steps: int) -> Training:
    """Q-learning with a target network that is copied every 50 steps, when the loss jumps."""
    body = mlp(_PLACES, 32, 2)
    target = copy.deepcopy(body)
    generator = dice(seed, 1)
    before = torch.randint(_PLACES - 1, (2000,), generator=generator)
    actions = torch.randint(2, (2000,), generator=generator)
    after, rewards = _moved(before, actions)

    def loss(body: nn.Module, states: Tensor, actions: Tensor, targets: Tensor) -> Tensor:
        values = body(states).gather(-1, actions[:, None]).squeeze(-1)
        return nn.functional.smooth_l1_loss(values, targets, beta=0.1)

    @torch.no_grad()
    def batch(step: int) -> Batch:
        rows = torch.randint(2000, (32,), generator=dice(seed, 2, step))
        value = target(nn.functional.one_hot(after[rows], _PLACES).float()).max(-1).values
        return {
            "states": nn.functional.one_hot(before[rows], _PLACES).float(),
            "actions": actions[rows],
            "targets": rewards[rows] + 0.9 * value * (1 - rewards[rows]),
        }

    def copy_target(step: int) -> None:
        if step % 50 == 0:
            target.load_state_dict(body.state_dict())

    def distance() -> float:
        moves_left = torch.arange(_PLACES - 2, -1, -1)
        found = body(torch.eye(_PLACES)[:-1])[:, 1]
        return (found - 0.9**moves_left).abs().mean().item()

    return one_part(Objective(body, loss), adam(body, 2e-3), batch, distance, after=copy_target)


def preference_pairs(seed: int, num_steps: int) -> Training:
    """Preferred rows beside rejected ones (DPO), against a frozen copy of the network."""
    body = small_gpt2()
    reference = copy.deepcopy(body).requires_grad_(requires_grad=False)
    liked, disliked = Text(seed), Text(seed + 1000)

    def chance(network: nn.Module, tokens: Tensor) -> Tensor:
        chances = network(input_ids=tokens[:, :-1]).logits.log_softmax(-1)
        return chances.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)

    def loss(body: nn.Module, chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
        found = chance(body, torch.cat([chosen, rejected])).chunk(2)
        return -nn.functional.logsigmoid(0.1 * (found[0] - found[1] - margin)).mean()

    @torch.no_grad()
    def batch(step: int, rows: int = 6) -> Batch:
        generator = dice(seed, 2, step)
        chosen, rejected = (each.draw(rows, 12, generator) for each in (liked, disliked))
        margin = chance(reference, chosen) - chance(reference, rejected)
        return {"chosen": chosen, "rejected": rejected, "margin": margin}

    def held_out() -> float:
        return loss(body, **batch(0, 64)).item()

    watches = ("max_attention_logit_format",)
    return one_part(Objective(body, loss), adam(body, 1e-3), batch, held_out, watches=watches)


def group_advantages(seed: int, num_steps: int) -> Training:
    """Rewards relative to a group of answers (GRPO): the loss is near zero, with either sign."""
    body = small_gpt2(16)
    reference = copy.deepcopy(body).requires_grad_(requires_grad=False)
    right = torch.randint(8, 16, (8, 2), generator=dice(seed, 1))
    kept: Batch = {}

    def chances(network: nn.Module, tokens: Tensor) -> Tensor:
        """Return the logarithms of the chances of the two tokens of each answer."""
        found = network(input_ids=tokens[:, :-1]).logits.log_softmax(-1)
        return found.gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def loss(
        body: nn.Module, tokens: Tensor, before: Tensor, frozen: Tensor, advantages: Tensor
    ) -> Tensor:
        found = chances(body, tokens)
        ratio, advantages = (found - before).exp(), advantages[:, None]
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        distance = (frozen - found).exp() - (frozen - found) - 1
        return (0.02 * distance - gain).mean()

    @torch.no_grad()
    def batch(step: int) -> Batch:
        # Each group of answers has two updates.
        if step % 2 == 1 or not kept:
            generator = dice(seed, 2, step)
            prompts = torch.randint(8, (4,), generator=generator).repeat_interleave(12)
            tokens = prompts[:, None]
            for _ in range(2):
                logits = body(input_ids=tokens).logits[:, -1]
                drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
                tokens = torch.cat([tokens, drawn], -1)
            rewards = (tokens[:, 1:] == right[prompts]).float().mean(-1).view(4, 12)
            centered = rewards - rewards.mean(-1, keepdim=True)
            kept.update(
                tokens=tokens,
                before=chances(body, tokens),
                frozen=chances(reference, tokens),
                advantages=(centered / (rewards.std(-1, keepdim=True) + 1e-4)).flatten(),
            )
        return dict(kept)

    def wrong_answers() -> float:
        """Return the share of tokens that are wrong in the most probable answers."""
        tokens = torch.arange(8)[:, None]
        for _ in range(2):
            best = body(input_ids=tokens).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, best], -1)
        return (tokens[:, 1:] != right).float().mean().item()

    watches = ("max_attention_logit_format",)
    return one_part(Objective(body, loss), adam(body, 1e-3), batch, wrong_answers, watches=watches)
