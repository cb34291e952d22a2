# SPDX-License-Identifier: MIT
"""PEARL: "Efficient Off-Policy Meta-Reinforcement Learning via Probabilistic Context Variables"
(Rakelly et al. 2019).

PEARL describes a task by a latent vector z and infers z from the transitions of earlier episodes,
the context c. An encoder turns each transition into a Gaussian factor, and the posterior q(z | c)
is the product of all factors, whatever their order:

    q(z | c) is proportional to prod_n N(z; mean_n, var_n),
    where (mean_n, var_n) = encoder(s_n, a_n, r_n)

(In the paper the encoder also sees the next state; in the authors' code it does not.)

In the first episode of a trial the agent draws z from the prior N(0, I), in each later one from the
posterior given the episodes so far (posterior sampling): it adapts from one episode to the next,
not within an episode. Gradient steps never use a z from the prior, so the first episode goes well
only if the KL divergence (below) keeps posteriors near it.

Soft actor-critic (SAC) learns a policy of (s, z) and two Q functions of (s, a, z), off-policy, from
a replay of past trials. A gradient step draws several trials, and of each two independent samples:
a context, from which z is inferred, and a batch, on which the policy and the Q functions are
trained with this z. The error of the Q functions also trains the encoder, and a KL divergence pulls
the posterior towards the prior. The policy's gradient stops at z.

    python -m baselines.pearl --env halfcheetah_vel

The main difference from the authors' PEARL: theirs visits a fixed set of tasks again and again, and
keeps a replay of each. Here tasks are drawn anew in every iteration, so each trial counts as a task
of its own: the context comes from its first episodes, the batch from all of it. Recent trials are
drawn more often, because contexts should be like those that the present policy produces.
docs/differences.md lists the other differences.

Shapes: an iteration collects R rows of T steps, a row being a trial, and the replay in memory keeps
the last K iterations. A gradient step draws M trials, with B transitions each and C transitions of
context (M and B mean something else in trmrl.py). S, A and Z are the sizes of a state, an action
and z.
"""

import copy
import math
import sys
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import trmrl
from baselines import NOT_FLAGS
from trmrl import setting

# Three episodes, as a meta-test is scored on the third, whose z comes from the first two.
COMMON = dict(num_tasks=10, episodes_per_trial=3, lr=1e-3)
PRESETS = {env: preset | COMMON for env, preset in trmrl.PRESETS.items()}
# On locomotion, fewer environment steps than TrMRL, but more gradient steps: off-policy, each
# transition is used many times. On MetaWorld, as many environment steps as TrMRL.
PRESETS["halfcheetah_vel"] |= dict(total_steps=900_000)
PRESETS["ant_dir"] |= dict(total_steps=900_000)
PRESETS["ml45"] |= dict(num_tasks=45)  # each class once


# Settings without a meaning here, most of them of PPO.
UNUSED = ("d_model", "init_std", "gae_lambda", "clip", "epochs", "minibatch", "value_lr")


@dataclass
class Config(trmrl.Config):
    presets = PRESETS
    not_flags = (*NOT_FLAGS, *UNUSED)
    one_process = True  # several would write the same replay.bin

    lr: float = setting("learning", None, "learning rate", high=1)
    keep_memory: bool = setting("agent", True, "the context lasts for the whole trial")
    latent_size: int = setting("agent", 5, "size of z", low=1)
    hidden_size: int = setting("agent", 128, "units per hidden layer", low=1)

    updates: int = setting("SAC", 1000, "gradient steps per iteration", low=1)
    meta_batch: int = setting("SAC", 16, "M, trials per gradient step", low=1)
    batch_size: int = setting("SAC", 32, "B, transitions per trial and gradient step", low=1)
    context_size: int = setting("SAC", 64, "C, transitions of context per trial", low=1)
    replay_size: int = setting("SAC", 10**6, "transitions in the replay", low=1)
    entropy_weight: float = setting("SAC", 0.1, "weight of the entropy, relative to scaled rewards")
    # Small, because the squared errors of the critics carry a factor (1 - gamma)^2, see `loss`. It
    # was tuned on the half-cheetah only; with another gamma, another weight may be better.
    kl_weight: float = setting("SAC", 2e-5, "weight of the KL divergence to the prior")
    target_rate: float = setting("SAC", 0.01, "tau of the target Q functions", low=1e-6, high=1)
    max_grad_norm: float = setting(
        "SAC", 10.0, "gradients are clipped to this joint norm", low=1e-9
    )


class Transitions(NamedTuple):
    """Transitions of the replay; the next state is that of the following step."""

    state: torch.Tensor  # (..., S), normalised
    action: torch.Tensor  # (..., A)
    reward: torch.Tensor  # (...), as are the following
    terminated: torch.Tensor  # 1 if the episode ended here, else 0
    timed_out: torch.Tensor  # 1 if it was cut off here by the time limit, else 0


def relu_mlp(inputs, hidden, outputs):
    """Two hidden layers with ReLU and PyTorch's initial weights (trmrl.mlp: tanh and Xavier's)."""
    layers = [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


def noise_like(x, generator):
    """Standard normal noise of the shape of x."""
    return torch.randn(x.shape, generator=generator, device=x.device)


class PEARL(trmrl.Agent):
    """Soft actor-critic with a latent variable of the task."""

    name = "pearl"
    command = "python -m baselines.pearl"
    Config = Config
    scored_episode = 3  # whatever E is: its z comes from two episodes, as in Rakelly et al.

    def __init__(self, config, sizes):
        S, A, _ = sizes
        Z, hidden = config.latent_size, config.hidden_size
        super().__init__(config, sizes, e_size=S + Z)
        # super() builds heads for PPO, which are replaced: SAC has two Q functions, and a policy
        # head that also gives the standard deviation.
        del self.value_head, self.log_std
        self.encoder = relu_mlp(S + A + 1, hidden, 2 * Z)
        self.policy_head = relu_mlp(S + Z, hidden, 2 * A)
        self.critics = nn.ModuleList(relu_mlp(S + A + Z, hidden, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        # Filled by `remember`, (K, R, T + 1, S + A + 3). A step has its raw state, action, reward,
        # terminated and timed_out; after the last step of a row comes one with only a state.
        self.replay = None
        # How many iterations it has remembered. As a registered buffer this is in the checkpoint.
        self.register_buffer("replay_iterations", torch.zeros((), dtype=torch.long))

    def posterior(self, state, action, reward):
        """Mean and variance (trials, Z) of q(z | c), given contexts (trials, length, ...).

        In training, length is C. When acting, the trials are the rows in which an episode begins,
        and length is all steps so far: on the half-cheetah, 400 before the third episode, so the
        standard deviation is about 2.5 times smaller. (The authors' code has the same mismatch.)
        """
        trials, length = reward.shape
        if length == 0:  # the first episode: the prior
            mean = torch.zeros(trials, self.config.latent_size, device=self.device)
            return mean, torch.ones_like(mean)

        scaled_reward = reward / self.reward_stats.root_mean_square
        transition = torch.cat([state, action, scaled_reward.unsqueeze(-1)], dim=-1)
        factor_mean, raw_var = self.encoder(transition).chunk(2, dim=-1)  # (trials, length, Z)
        factor_var = F.softplus(raw_var) + 1e-6

        # In a product of Gaussians, precisions (1 / var_n) add up, and they weight the means. As in
        # the authors' code, the prior is not a factor: it is used only without any context.
        precision = 1 / factor_var
        var = 1 / precision.sum(dim=1)
        mean = var * (precision * factor_mean).sum(dim=1)
        return mean, var

    def sample_action(self, state, z, noise):
        """Actions a = tanh(u), u ~ N(mean, std^2), and their log_prob."""
        mean, log_std = self.policy_head(torch.cat([state, z], dim=-1)).chunk(2, dim=-1)
        log_std = log_std.clamp(-5.0, 2.0)  # the authors: -20 and 2
        u = mean + log_std.exp() * noise
        # log pi(a) = sum [log N(u; mean, std^2) - log slope]. In the first, (u - mean) / std is the
        # noise. The slope is that of the tanh, 1 - tanh(u)^2 = 4 / (e^u + e^-u)^2; to write
        # log(e^u + e^-u) as u + softplus(-2 u) is stable.
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
        return u.tanh(), (log_normal - log_slope).sum(dim=-1)

    def q_values(self, critics, state, action, z):
        """Both Q functions, (2, ...)."""
        x = torch.cat([state, action, z], dim=-1)
        return torch.stack([critic(x).squeeze(-1) for critic in critics])

    def new_buffer(self, rows, steps, generator):
        """z[:, t] is the z of step t; there are T + 1, because `act` is also called at t = T.

        Its noise is drawn in advance for every t, because an episode may begin at any step (and, as
        with actions, asking twice gives the same answer).
        """
        buffer = super().new_buffer(rows, steps, generator)
        z = torch.zeros(rows, steps + 1, self.config.latent_size, device=self.device)
        buffer.stored["z"] = z
        buffer.stored["z_noise"] = noise_like(z, generator)
        return buffer

    def act(self, buffer, t, sample):
        """Action (R, A) and log_prob (R,) of step t; zeros for a value, which SAC does not need."""
        # z is constant within an episode. When one begins, z is drawn from the posterior given all
        # earlier steps of the trial, even in a meta-test with mean actions.
        z, z_noise = buffer.stored["z"], buffer.stored["z_noise"]
        if t == 0:
            begins = torch.ones(len(z), dtype=torch.bool, device=self.device)
        else:
            begins = buffer.eta[:, t - 1] > 0
            z[:, t] = z[:, t - 1]
        if begins.any():
            state, reward = buffer.state[begins, :t], buffer.reward[begins, :t]
            mean, var = self.posterior(state, buffer.clipped_action[begins, :t], reward)
            z[begins, t] = mean + var.sqrt() * z_noise[begins, t]

        noise = buffer.noise[:, t] if sample else torch.zeros_like(buffer.noise[:, t])
        action, log_prob = self.sample_action(buffer.state[:, t], z[:, t], noise)
        return action, log_prob, torch.zeros_like(log_prob)

    # ---- Learning --------------------------------------------------------------------------------

    def parameter_groups(self):
        learned = [p for p in self.parameters() if p.requires_grad]  # all but the targets
        # eps is Adam's default; a Run sets 1e-5, for PPO.
        return [dict(params=learned, lr=self.config.lr, eps=1e-8)]

    def update(self, buffer, optimizer, generator):
        """Add the trials to the replay, then take gradient steps on it."""
        config = self.config
        # The replay holds raw states, which are normalised anew whenever they are drawn.
        self.normalizer.update(buffer.raw_state[:, :-1].flatten(0, 1))
        self.reward_stats.update(buffer.reward.reshape(-1, 1))
        self.remember(buffer)

        iterations = int(self.replay_iterations)  # not in the loop: int() waits for a GPU
        totals = 0.0  # becomes a tensor, which stays on the GPU
        for _ in range(config.updates):
            samples = self.sample_replay(iterations, generator)
            context, batch, next_steps = map(self.unpack, samples)
            loss, metrics = self.loss(context, batch, next_steps, generator)
            metrics["grad_norm"] = trmrl.gradient_step(self, optimizer, loss)
            totals += torch.stack(list(metrics.values()))
            for slow, fast in zip(self.targets.parameters(), self.critics.parameters()):
                slow.lerp_(fast.detach(), config.target_rate)  # Q' <- Q' + rate (Q - Q')

        means = dict(zip(metrics, (totals / config.updates).tolist()))
        return means | {"updates": config.updates}

    def sample_replay(self, iterations, generator):
        """Packed steps of M trials: a context (M, C, ...), a batch (M, B, ...), its next steps.

        All draws are with replacement.
        """
        config = self.config
        M, B, C = config.meta_batch, config.batch_size, config.context_size
        E = config.episodes_per_trial
        K, R, columns, _ = self.replay.shape
        T = columns - 1
        uniform = partial(torch.rand, generator=generator, device=self.device)

        # Draw M trials. The square prefers recent ones: half of the draws fall in the most recent
        # quarter.
        age = (uniform(M, 1).square() * min(iterations, K)).long()
        slot = (iterations - 1 - age) % K  # (M, 1)
        row = (uniform(M, 1) * R).long()  # (M, 1)

        # A context is C random steps of the first e episodes, where e is drawn from 1 to E - 1 (it
        # is 1 if E is 1). Even if episodes ended early, these are e T / E steps. The RL batch comes
        # from the whole trial.
        context_episodes = 1 + (uniform(M, 1) * (E - 1)).long()
        t_context = (uniform(M, C) * context_episodes * T / E).long()
        t = (uniform(M, B) * T).long()
        return tuple(self.replay[slot, row, step] for step in (t_context, t, t + 1))

    def loss(self, context, batch, next_steps, generator):
        """The loss, and metrics. The context is (M, C, ...), the batch and next_steps (M, B, ...).

        As in later versions of SAC, target Q functions replace the value function.
        """
        state, action, reward, terminated, timed_out = batch
        next_state = next_steps.state

        # Scale rewards to root mean square 1, as in `posterior`. A constant reward of 1 is worth
        # 1 / (1 - gamma), so the factor 1 - gamma makes Q of order 1. The entropy adds to the
        # reward, so its weight alpha has the same factor.
        gamma = self.config.gamma
        r = (1 - gamma) * (reward / self.reward_stats.root_mean_square)
        alpha = (1 - gamma) * self.config.entropy_weight

        # z ~ q(z | c), the same for all transitions of a trial; KL(q(z | c) || N(0, I)).
        mean, var = self.posterior(context.state, context.action, context.reward)
        z = mean + var.sqrt() * noise_like(mean, generator)
        z = z[:, None].expand(-1, state.shape[1], -1)  # (M, B, Z)
        kl = 0.5 * (mean.square() + var - var.log() - 1).sum(dim=-1).mean()

        # y = r + gamma (1 - terminated) (min_i Q'_i(s', a', z) - alpha log pi(a' | s', z)), where
        # a' ~ pi(. | s', z) and Q' are the targets.
        with torch.no_grad():
            noise = noise_like(action, generator)
            next_action, next_log_prob = self.sample_action(next_state, z, noise)
            next_q = self.q_values(self.targets, next_state, next_action, z).amin(dim=0)
            y = r + gamma * (1 - terminated) * (next_q - alpha * next_log_prob)

        # The critics' error also trains the encoder, through z. Steps at a time limit are left out
        # (error 0): the next state in the replay belongs to the next episode, if there is one.
        error = (1 - timed_out) * (self.q_values(self.critics, state, action, z) - y)  # (2, M, B)
        critic_loss = error.square().mean(dim=(1, 2)).sum()

        # The policy maximises min_i Q_i(s, a, z) - alpha log pi(a | s, z). This loss trains the
        # policy alone: z is detached, and the critics are constants while its graph is built. (The
        # graph of critic_loss exists already and is not affected.)
        z = z.detach()
        self.critics.requires_grad_(False)
        new_action, log_prob = self.sample_action(state, z, noise_like(action, generator))
        min_q = self.q_values(self.critics, state, new_action, z).amin(dim=0)
        policy_loss = (alpha * log_prob - min_q).mean()
        self.critics.requires_grad_(True)

        loss = critic_loss + policy_loss + self.config.kl_weight * kl
        metrics = dict(critic_loss=critic_loss, q=min_q.mean(), kl=kl, entropy=-log_prob.mean())
        return loss, {name: x.detach() for name, x in metrics.items()}

    # ---- The replay as it is kept (machinery, which you can skip) --------------------------------

    def pack(self, buffer):
        """The trials of a buffer as the replay keeps them, (R, T + 1, S + A + 3)."""
        timed_out = buffer.eta.masked_fill(buffer.terminated, 0.0)
        outcome = torch.stack([buffer.reward, buffer.terminated, timed_out], dim=-1)
        outcome = F.pad(outcome, (0, 0, 0, 1))  # after the last step there is only a state
        return torch.cat([buffer.raw_state, buffer.clipped_action, outcome], dim=-1)

    def unpack(self, steps):
        """Packed steps, (..., S + A + 3), as Transitions."""
        S, A, _ = self.sizes
        raw_state, action, outcome = steps.split([S, A, 3], dim=-1)
        return Transitions(self.normalizer(raw_state), action, *outcome.unbind(dim=-1))

    def remember(self, buffer):
        """Add trials to the replay: the last K iterations are in self.replay, all in replay.bin.

        The file, to which each iteration is appended, is for --resume. In the checkpoint, which is
        written anew each time, the replay would cost too much. The checkpoint says how many of the
        file's iterations are valid; what was written between it and a crash is cut off here.
        """
        trials = self.pack(buffer)
        earlier = int(self.replay_iterations)
        file = self.folder / "replay.bin" if self.folder else None  # none without a Run
        if self.replay is None:  # only now are the shapes known
            K = math.ceil(self.config.replay_size / buffer.reward.numel())
            self.replay = trials.new_zeros(K, *trials.shape)
            if earlier > 0:  # after --resume
                self.read_replay(file, earlier)

        self.replay[earlier % len(self.replay)] = trials
        self.replay_iterations += 1
        if file:
            with open(file, "ab") as stream:
                stream.truncate(earlier * trials.nbytes)
                stream.write(trials.cpu().numpy().tobytes())

    def read_replay(self, file, iterations):
        """Read the last K iterations back from the file."""
        K, *shape = self.replay.shape
        nbytes = self.replay[0].nbytes  # of an iteration
        if not file.exists() or file.stat().st_size < iterations * nbytes:
            raise trmrl.UserError(f"{file} has lost trials; start a new run")
        for i in range(max(0, iterations - K), iterations):
            saved = np.fromfile(file, np.float32, math.prod(shape), offset=i * nbytes)
            self.replay[i % K] = torch.from_numpy(saved).view(shape)


if __name__ == "__main__":
    sys.exit(trmrl.main(agent_class=PEARL))
