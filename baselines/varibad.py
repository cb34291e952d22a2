# SPDX-License-Identifier: MIT
"""VariBAD: "A Very Good Method for Bayes-Adaptive Deep RL via Meta-Learning"
(Zintgraf et al. 2020).

The agent is uncertain about the task, and it knows how uncertain it is: it holds a belief about the
task, a Gaussian over a small latent vector z. An encoder, a GRU over all that happened in the trial
so far, updates the belief at every step. A decoder must predict the reward of every transition of
the trial, past and future, from the transition and a sample z of the belief: this teaches the
encoder what distinguishes tasks. Encoder and decoder are thus a variational autoencoder (VAE),
whose prior at each step is the belief of the step before. PPO trains a policy on the state and the
belief (mean and log-variance), so the agent can act on its uncertainty. PPO's gradient stops at the
belief.

    python -m baselines.varibad --env halfcheetah_vel

Read rl2.py first: the inputs of the GRU, segments and stored hidden states are the same.

The main differences from the authors' code: the VAE learns from the current batch, not from a
replay buffer, and each segment starts from a stored hidden state, where theirs runs the GRU anew
from the start of the trial. docs/differences.md lists the others.

Letters beside those of trmrl.py:

    z, Z      the latent vector (m in Zintgraf et al.) and its size
    tau_{:t}  what the agent knows when it acts at step t: earlier steps and s_t, not a_t and r_t
    r_i       the reward of step i (r_{i+1} in Zintgraf et al.)
    K, J      a gradient step decodes K beliefs of each row, and each of them into J rewards
"""

import sys
from dataclasses import dataclass

import torch
from torch import nn

import trmrl
from baselines import NOT_FLAGS
from baselines.rl2 import gru_inputs, segment_length
from trmrl import setting

NUM_BELIEFS = 20  # K: beliefs per row that a gradient step decodes
NUM_REWARDS = 20  # J: rewards that each of them predicts

# On the half-cheetah the policy, an MLP, tolerates a higher learning rate than the transformer. On
# MetaWorld a trial has two episodes, as in rl2.py. A larger encoder helped on Reach, not on Push.
SIZES = dict(d_model=64, latent_size=5)
PRESETS = {env: preset | SIZES for env, preset in trmrl.PRESETS.items()}
PRESETS["halfcheetah_vel"] |= dict(lr=1e-3)
PRESETS["ml1"] |= dict(episodes_per_trial=2)
PRESETS["ml1_reach"] = PRESETS["ml1"] | dict(d_model=128, latent_size=10)
PRESETS["ml45"] |= dict(episodes_per_trial=2)


@dataclass
class Config(trmrl.Config):
    presets = PRESETS
    not_flags = NOT_FLAGS

    d_model: int = setting("agent", None, "d, size of the encoder's hidden state", low=1)
    keep_memory: bool = setting("agent", True, "the belief lasts for the whole trial")
    lr: float = setting("learning", None, "learning rate of the policy", high=1)
    latent_size: int = setting("VAE", None, "size of z", low=1)
    vae_lr: float = setting("VAE", 1e-3, "learning rate of encoder and decoder", high=1)
    vae_updates: int = setting("VAE", 30, "gradient steps per iteration", low=1)


def kl_divergence(mean, log_var, prior_mean, prior_log_var):
    """KL(N(mean, var) || N(prior_mean, prior_var)) of independent components, (..., Z) -> (...)."""
    var_ratio = (log_var - prior_log_var).exp()
    scaled_distance = (mean - prior_mean).square() / prior_log_var.exp()
    return 0.5 * (var_ratio + scaled_distance - 1 - (log_var - prior_log_var)).sum(dim=-1)


class VAE(nn.Module):
    """The encoder q(z | tau_{:t}) and the reward decoder p(r_i | s_i, a_i, s_{i+1}, z).

    A belief is the mean and the log-variance of q(z | tau_{:t}), 2 Z numbers.
    """

    def __init__(self, S, A, d, Z):
        super().__init__()
        self.gru = nn.GRU(S + A + 2, d, batch_first=True)
        self.to_belief = nn.Linear(d, 2 * Z)
        self.decoder = trmrl.mlp([Z + S + A + S, 64, 64, 1])

    def encode(self, x, hidden):
        """The beliefs (segments, length, 2 Z), and the hidden states after the last steps.

        x is (segments, length, S + A + 2); when the agent acts, length is 1. Hidden states are
        (1, segments, d).
        """
        output, next_hidden = self.gru(x, hidden)
        return self.to_belief(output), next_hidden

    def decode(self, z, transition):
        """Predicted rewards (R, K, J) of transitions (R, J, S + A + S), for each z (R, K, Z)."""
        R, K, _ = z.shape
        J = transition.shape[1]
        z = z[:, :, None].expand(R, K, J, -1)
        transition = transition[:, None].expand(R, K, J, -1)
        return self.decoder(torch.cat([z, transition], dim=-1)).squeeze(-1)


class VariBAD(trmrl.Agent):
    """An agent that acts on its state and its belief about the task."""

    name = "varibad"
    command = "python -m baselines.varibad"
    Config = Config

    def __init__(self, config, sizes):
        S, A, _ = sizes
        super().__init__(config, sizes, e_size=S + 2 * config.latent_size)
        self.vae = VAE(S, A, config.d_model, config.latent_size)
        # Brings beliefs to about unit scale for the policy.
        self.belief_normalizer = trmrl.RunningStats(2 * config.latent_size)

    def new_buffer(self, rows, steps, generator):
        """Adds stored["hidden"] and stored["belief"].

        hidden[:, t] is the encoder's hidden state before step t, and belief[:, t] is q(z |
        tau_{:t}). `act` is also called after the last step: it then writes their last columns.
        """
        buffer = super().new_buffer(rows, steps, generator)
        d, Z = self.config.d_model, self.config.latent_size
        buffer.stored["hidden"] = torch.zeros(rows, steps + 2, d, device=self.device)
        buffer.stored["belief"] = torch.zeros(rows, steps + 1, 2 * Z, device=self.device)
        return buffer

    def act(self, buffer, t, sample):
        """Update the belief of every row, then act on it."""
        hidden = buffer.stored["hidden"]
        row = torch.arange(len(hidden), device=self.device)
        x = gru_inputs(buffer, row, torch.full_like(row, t))
        with torch.no_grad():  # else PPO's gradient could pass through what is stored here
            # hidden[row, t], not hidden[:, t]: a contiguous copy, which cuDNN needs.
            belief, next_hidden = self.vae.encode(x[:, None], hidden[row, t][None])
        hidden[:, t + 1] = next_hidden[0]
        buffer.stored["belief"][:, t] = belief[:, 0]
        return super().act(buffer, t, sample)

    def recall(self, buffer, row, t):
        """The state and the belief, (M, S + 2 Z).

        Unlike in rl2.py, PPO does not run the GRU again: the belief is read from the buffer, as it
        was when the agent acted. So PPO's gradient stops at the belief.
        """
        belief = self.belief_normalizer(buffer.stored["belief"][row, t])
        return torch.cat([buffer.state[row, t], belief], dim=-1)

    def update(self, buffer, optimizer, generator):
        """PPO, then vae_updates gradient steps of the VAE, each on all rows of the same batch."""
        metrics = super().update(buffer, optimizer, generator)
        # Only now: PPO must see the beliefs normalised as they were when the agent acted.
        self.belief_normalizer.update(buffer.stored["belief"][:, :-1].flatten(0, 1))

        R, T = buffer.reward.shape
        K, J, Z = NUM_BELIEFS, NUM_REWARDS, self.config.latent_size
        totals = torch.zeros(3, device=self.device)
        updates = self.config.vae_updates
        for _ in range(updates):
            # The full ELBO decodes T x T rewards per row. We draw (with replacement) K of the T
            # beliefs and J of the T rewards, the same for all rows; each of the K predicts all J.
            t = torch.randint(T, (K,), generator=generator, device=self.device)
            i = torch.randint(T, (J,), generator=generator, device=self.device)
            noise = torch.randn(R, K, Z, generator=generator, device=self.device)
            error, kl = self.elbo_losses(buffer, t, i, noise)
            # This loss does not reach the policy, and PPO's does not reach the VAE. gradient_step
            # first sets all gradients to None, and Adam leaves parameters without one alone.
            # max_grad_norm applies here, too.
            norm = trmrl.gradient_step(self, optimizer, error + kl)
            totals += torch.stack([error, kl, norm]).detach()

        means = trmrl.sum_over_processes(totals) / trmrl.WORLD_SIZE / updates
        error, kl, norm = means.tolist()
        # As in the loss: reward_error has the Gaussian's 1/2 in it, kl is divided by T.
        metrics |= dict(reward_error=error, kl=kl, vae_grad_norm=norm)
        metrics["updates"] += updates  # of PPO and the VAE together
        return metrics

    def elbo_losses(self, buffer, t, i, noise):
        """The two parts of the loss, the error of predicted rewards and the KL divergence.

        ELBO = sum_t { E_{z ~ q(. | tau_{:t})} [ sum_i log p(r_i | s_i, a_i, s_{i+1}, z) ]
                       - KL( q(z | tau_{:t}) || q(z | tau_{:t-1}) ) }

        where t and i run over the T steps of a row (the last steps of episodes count 0 in the sum
        over i), and the prior of t = 0 is N(0, I). The loss is -ELBO / T^2 up to a constant,
        averaged over rows: the double sum over rewards becomes a mean, the sum over KL divergences
        a mean divided by T.
        The error estimates the ELBO's first term from the given t (K,) and i (J,) and from one z
        per belief, made from its noise (R, K, Z).
        """
        belief = self.encode_trials(buffer)
        mean, log_var = belief.chunk(2, dim=-1)  # (R, T, Z) each
        T = belief.shape[1]

        # z ~ q(z | tau_{:t}), by the reparameterisation trick: the gradient reaches mean and std.
        std = (0.5 * log_var[:, t]).exp()
        z = mean[:, t] + noise * std  # (R, K, Z)

        # log p(r | ...) = -(r - predicted)^2 / 2 + constant. The last reward of an episode has
        # weight 0, because the row continues with the first state of the next episode.
        state, next_state = buffer.state[:, i], buffer.state[:, i + 1]
        transition = torch.cat([state, buffer.clipped_action[:, i], next_state], dim=-1)
        predicted = self.vae.decode(z, transition)  # (R, K, J)
        reward = self.reward_stats(buffer.reward[:, i])  # mean 0 and variance 1 over all so far
        not_last = 1 - buffer.eta[:, i]
        squares = (reward[:, None] - predicted).square()
        error = 0.5 * (not_last[:, None] * squares).mean()

        # The prior of a belief is the belief before it, which the gradient reaches, too. This term
        # is cheap, so it takes all t.
        first_prior = torch.zeros_like(belief[:, :1])  # mean and log-variance 0: N(0, I)
        prior = torch.cat([first_prior, belief[:, :-1]], dim=1)
        prior_mean, prior_log_var = prior.chunk(2, dim=-1)
        kl = kl_divergence(mean, log_var, prior_mean, prior_log_var).mean() / T
        return error, kl

    def encode_trials(self, buffer):
        """The beliefs of all steps, (R, T, 2 Z).

        As in RL^2 the gradient flows back through segments, from the stored hidden states. These
        come from the encoder that acted, not from the present one, so the first belief of a segment
        does not quite follow from the last one of the segment before.
        """
        R, T = buffer.reward.shape
        length = segment_length(T)
        row = torch.arange(R, device=self.device)[:, None]
        t = torch.arange(T, device=self.device)
        x = gru_inputs(buffer, row, t)  # (R, T, S + A + 2)
        hidden = buffer.stored["hidden"][row, t[::length]]  # (R, segments per row, d)
        segments = x.reshape(R * T // length, length, -1)
        belief, _ = self.vae.encode(segments, hidden.flatten(0, 1)[None])
        return belief.view(R, T, -1)

    def parameter_groups(self):
        """Policy, value head and VAE, each with its learning rate. All of them decay."""
        policy, value = super().parameter_groups()
        policy["params"] = [self.log_std, *self.policy_head.parameters()]  # without the VAE
        # eps as in the authors' code, Adam's default; a Run sets PPO's 1e-5.
        vae = dict(params=list(self.vae.parameters()), lr=self.config.vae_lr, eps=1e-8)
        return [policy, value, vae]


if __name__ == "__main__":
    sys.exit(trmrl.main(agent_class=VariBAD))
