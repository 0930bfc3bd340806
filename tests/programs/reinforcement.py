"""Reinforcement learning: value functions, policy gradients, replay, vectorised environments."""

from __future__ import annotations

import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def dqn_updates(device: torch.device) -> None:
    """Fill a replay buffer on the device, and train a Q-network on samples with a target network."""
    online = _mlp(8, 64, 64, 4).to(device)
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    capacity = 128
    states, following = torch.zeros(capacity, 8, device=device), torch.zeros(capacity, 8, device=device)
    actions = torch.zeros(capacity, dtype=torch.long, device=device)
    rewards, done = torch.zeros(capacity, device=device), torch.zeros(capacity, dtype=torch.bool, device=device)
    for i in range(20):
        states[i], following[i] = torch.randn(8), torch.randn(8, device=device)
        actions[i], rewards[i], done[i] = i % 4, float(i), i % 7 == 0
    for _ in range(3):
        batch = torch.randint(0, 20, (16,)).to(device)
        value = online(states[batch]).gather(1, actions[batch].unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = target(following[batch]).max(dim=1).values
            goal = rewards[batch] + 0.99 * best * (~done[batch])
        loss = F.smooth_l1_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(online.parameters(), 1.0)
        optimizer.step()
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.data.mul_(0.995).add_(fast.data, alpha=0.005)


def policy_gradient(device: torch.device) -> None:
    """Act for ten steps in an environment on the host, and update the policy with REINFORCE."""
    policy = _mlp(4, 32, 2).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    state, logs, rewards = torch.zeros(4), [], []
    for _ in range(10):
        distribution = torch.distributions.Categorical(logits=policy(state.to(device)))
        action = distribution.sample()
        logs.append(distribution.log_prob(action))
        state = state * 0.9 + (0.1 if action.item() else -0.1)
        rewards.append(1.0 - float(state.abs().max()))
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    returns_t = torch.tensor(returns, device=device)
    returns_t = (returns_t - returns_t.mean()) / (returns_t.std() + 1e-8)
    loss = -(torch.stack(logs) * returns_t).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def ppo_epoch(device: torch.device) -> None:
    """Compute generalised advantages on the device, and run PPO on shuffled mini-batches."""
    actor, critic = _mlp(6, 32, 3).to(device), _mlp(6, 32, 1).to(device)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5)
    steps, envs = 16, 4
    obs, rewards = torch.randn(steps, envs, 6, device=device), torch.randn(steps, envs, device=device)
    with torch.no_grad():
        distribution = torch.distributions.Categorical(logits=actor(obs))
        actions = distribution.sample()
        old = distribution.log_prob(actions)
        values = critic(obs).squeeze(-1)
        advantages, last = torch.zeros_like(rewards), torch.zeros(envs, device=device)
        for t in reversed(range(steps)):
            after = values[t + 1] if t + 1 < steps else torch.zeros(envs, device=device)
            delta = rewards[t] + 0.99 * after - values[t]
            advantages[t] = last = delta + 0.99 * 0.95 * last
        returns = advantages + values
    flat = [x.reshape(steps * envs, *x.shape[2:]) for x in (obs, actions, old, advantages, returns)]
    for batch in torch.randperm(steps * envs, device=device).split(32):
        o, a, logp, advantage, ret = (x[batch] for x in flat)
        distribution = torch.distributions.Categorical(logits=actor(o))
        ratio = (distribution.log_prob(a) - logp).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = -clipped + 0.5 * F.mse_loss(critic(o).squeeze(-1), ret) - 0.01 * distribution.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        if (ratio - 1 - ratio.log()).mean().item() > 10:
            break


def soft_actor_critic(device: torch.device) -> None:
    """Update a squashed Gaussian policy, two critics and the temperature of soft actor-critic."""
    actor = _mlp(10, 64, 6).to(device)
    critics = nn.ModuleList([_mlp(13, 64, 1), _mlp(13, 64, 1)]).to(device)
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros(1, requires_grad=True, device=device)
    groups = [actor.parameters(), critics.parameters(), [log_alpha]]
    actor_opt, critic_opt, alpha_opt = (torch.optim.Adam(group, lr=3e-4) for group in groups)
    state, action, following = (torch.randn(32, n).to(device) for n in (10, 3, 10))
    reward = torch.randn(32, 1).to(device)

    def act(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = actor(s).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        return raw.tanh(), (normal.log_prob(raw) - torch.log(1 - raw.tanh() ** 2 + 1e-6)).sum(-1, keepdim=True)

    with torch.no_grad():
        a, logp = act(following)
        lowest = torch.min(*(q(torch.cat([following, a], -1)) for q in targets))
        goal = reward + 0.99 * (lowest - log_alpha.exp() * logp)
    critic_loss = sum(F.mse_loss(q(torch.cat([state, action], -1)), goal) for q in critics)
    critic_opt.zero_grad()
    critic_loss.backward()
    critic_opt.step()
    a, logp = act(state)
    actor_loss = (log_alpha.exp().detach() * logp - torch.min(*(q(torch.cat([state, a], -1)) for q in critics))).mean()
    actor_opt.zero_grad()
    actor_loss.backward()
    actor_opt.step()
    alpha_loss = -(log_alpha * (logp + 3).detach()).mean()
    alpha_opt.zero_grad()
    alpha_loss.backward()
    alpha_opt.step()
    torch._foreach_lerp_(list(targets.parameters()), list(critics.parameters()), 0.005)


def vectorised_cartpole(device: torch.device) -> None:
    """Simulate 256 cart poles on the device for twenty steps, and reset those that fell."""
    state = (torch.rand(256, 4) * 0.1 - 0.05).to(device)
    steps = torch.zeros(256, dtype=torch.int32, device=device)
    fallen = 0
    for _ in range(20):
        force = torch.where(torch.sin(steps * 1.7) > 0, 10.0, -10.0)
        x, v, angle, spin = state.unbind(dim=1)
        sine, cosine = angle.sin(), angle.cos()
        push = (force + 0.05 * spin.square() * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        state = torch.stack(
            [x + 0.02 * v, v + 0.02 * (push - 0.05 * turn * cosine / 1.1), angle + 0.02 * spin, spin + 0.02 * turn], 1
        )
        steps += 1
        done = state[:, 2].abs() > 0.2
        if done.any():
            fallen += int(done.sum())
            state[done] = 0.0
            steps[done] = 0
    steps.float().mean().item()
