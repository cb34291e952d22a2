# SPDX-License-Identifier: MIT
"""MAML: "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks" (Finn et al. 2017).

MAML learns initial weights theta from which one step of policy gradient adapts to a new task. In
the first E - 1 of the E episodes of a trial, the agent explores with theta. It then takes the inner
step, theta' = theta + alpha grad J(theta), and acts with theta' from then on. Meta-training
maximises what theta' earns, so the outer gradient passes through the inner one: MAML needs second
derivatives. TRPO chooses the outer step: the best one that changes the adapted policies by at most
a given KL divergence.

    python -m baselines.maml --env halfcheetah_vel

The policy has no memory. The inner step learns from the randomness of the actions, so the agent
samples while it explores, also in meta-tests with mean actions. The outer gradient treats the
explored steps as fixed data: no action gets credit for later states to which it leads.

Differences from the paper, and some details:

- The paper gathers 20 episodes of a task (40 on AntDir) for the inner step and as many for the
  outer one. We have one trial: E - 1 exploring episodes (two by default), then an adapted one (if
  the ant falls early, others fill the row).
- Networks have two layers of 64 tanh units (the paper: 100 ReLU), states are normalised, and gamma
  is the preset's.
- Advantages are those of GAE, with a baseline fitted to all tasks of the previous batch (see
  the value baseline). On MetaWorld it extrapolates in time, because test episodes are longer.
- The inner step uses probability ratios instead of log-probabilities: their gradient is the same,
  their second derivative is not (see surrogate).
- TRPO has a larger KL bound and more damping than in the authors' code.
- A meta-test takes one inner step, not several.

Shapes: R rows of T steps, each row a trial of one task; the steps of one phase are in C <= T
columns (see Samples); S and A are the sizes of a state and an action; P weights of the policy,
log_std included, as one vector; D features of the value baseline.
"""

import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

# grad(f)(x) is the gradient of f at x; vmap(f) applies f to each row; functional_call runs a module
# with other weights; vjp(f, x) gives products of vectors with the derivative of f at x.
from torch.func import functional_call, grad, vjp, vmap

import trmrl
from baselines import NOT_FLAGS
from trmrl import setting

RIDGE = 1e-3  # of the linear value baseline
CG_ITERATIONS = 10  # of conjugate gradients
DAMPING = 0.3  # added to the diagonal of the Hessian of the KL divergence
STEP_FRACTIONS = [0.8**i for i in range(15)]  # of the TRPO step, tried in turn

# TRPO, not Adam, changes the weights, so lr is 0. A policy gradient is noisy: on the half-cheetah
# we take more environment steps, explore more and have a higher lambda than TrMRL.
COMMON = dict(episodes_per_trial=3, lr=0.0)
PRESETS = {env: preset | COMMON for env, preset in trmrl.PRESETS.items()}
PRESETS["halfcheetah_vel"] |= dict(total_steps=5_000_000, init_std=0.5, gae_lambda=0.95)


@dataclass
class Config(trmrl.Config):
    presets = PRESETS
    not_flags = (*NOT_FLAGS, "d_model", "clip", "epochs", "minibatch")
    not_flags += ("lr", "value_lr", "final_lr", "max_grad_norm")  # the settings of Adam

    episodes_per_trial: int = setting("training", None, "E; the first E - 1 explore", low=2)
    # There is no memory to keep: this puts the E episodes of a trial into one row.
    keep_memory: bool = setting("agent", True, "a row is a whole trial")
    inner_lr: float = setting("MAML", 0.1, "alpha, size of the inner step", high=1000)
    max_kl: float = setting("MAML", 0.05, "largest KL divergence of an outer step", low=1e-6)

    def __post_init__(self):
        if trmrl.WORLD_SIZE > 1:
            raise trmrl.UserError("maml runs in one process; start it without torchrun")
        super().__post_init__()


# ---- Policy and agent ----------------------------------------------------------------------------
#
# A trial has two phases: exploring, the first E - 1 episodes, from which the inner step learns; and
# adapted, the rest, from which the outer step does. Phase (end of this file) picks the steps of one
# of them from a buffer and computes their advantages; Samples is what remains for the gradient.


class Samples(NamedTuple):
    """The steps of one phase of R rows, as a policy gradient needs them.

    Episodes may end early, so a phase may cover different columns in different rows. We keep the C
    columns that at least one row uses; where a row does not use one of them, step_weight is 0.
    Inside vmap, which maps a function over the rows of every tensor here, the leading R is absent.
    """

    state: torch.Tensor  # (R, C, S)
    action: torch.Tensor  # (R, C, A)
    old_log_prob: torch.Tensor  # (R, C), when the action was taken
    advantage: torch.Tensor  # (R, C), mean 0 and variance 1 in each row
    step_weight: torch.Tensor  # (R, C), sum 1 in each row


def surrogate(mean, log_std, samples):
    """J of one row: the mean over its steps of Adv pi(a | s) / pi_old(a | s).

    The outer gradient needs the Hessian H of the inner J, since d theta' / d theta = I + alpha H:

        outer gradient = (I + alpha H) g',   g' = gradient of the outer J at theta'
        H = mean of Adv (grad^2 log pi + grad log pi (grad log pi)^T),   at pi = pi_old

    Adv log pi has the same gradient there, but its Hessian lacks the last term. That term makes an
    exploring action likelier if its part of the inner step, Adv grad log pi, points along g'
    (Rothfuss et al. 2019).
    """
    log_prob = trmrl.gaussian_log_prob(mean, log_std, samples.action)
    ratio = (log_prob - samples.old_log_prob).exp()
    return (samples.step_weight * samples.advantage * ratio).sum()


def kl_divergence(old_mean, old_log_std, new_mean, new_log_std, samples):
    """KL(old || new) of two Gaussian policies, averaged over the steps of one row.

    log(std_new / std_old) + (std_old^2 + (mean_old - mean_new)^2) / (2 std_new^2) - 1/2
    """
    numerator = (2 * old_log_std).exp() + (old_mean - new_mean) ** 2
    kl = new_log_std - old_log_std + 0.5 * numerator / (2 * new_log_std).exp() - 0.5
    return (samples.step_weight * kl.sum(dim=-1)).sum()


class MAML(trmrl.Agent):
    """A policy that one gradient step adapts to a new task."""

    name = "maml"
    command = "python -m baselines.maml"
    Config = Config

    def __init__(self, config, sizes):
        S = sizes[0]
        super().__init__(config, sizes, e_size=S)
        self.scored_episode = config.episodes_per_trial  # the first after the inner step
        del self.value_head  # a linear value baseline takes its place
        # The weights of two linear value baselines, exploring and adapted, (2, D).
        self.register_buffer("betas", torch.zeros(2, 3 * S + 4))

    @property
    def theta(self):
        """The initial weights as one vector, (P,)."""
        return nn.utils.parameters_to_vector(self.parameters()).detach()

    def policy(self, weights, state):
        """Mean (..., A) and log_std (A,) of the policy whose weights are (P,)."""
        # parameters() yields log_std first, then those of the policy head.
        log_std, *head = weights.split([p.numel() for p in self.parameters()])
        pairs = zip(self.policy_head.named_parameters(), head)
        named_weights = {name: part.view_as(p) for (name, p), part in pairs}
        return functional_call(self.policy_head, named_weights, (state,)), log_std

    def adapt(self, theta, samples):
        """The inner step, theta' = theta + alpha grad J(theta), of all rows at once: (R, P).

        theta includes log_std, so it is adapted, too.
        """

        def J(weights, row_samples):
            return surrogate(*self.policy(weights, row_samples.state), row_samples)

        # theta is shared (None), the samples are split by row (0). This grad works even where
        # gradients are switched off, as when the agent acts.
        return theta + self.config.inner_lr * vmap(grad(J), in_dims=(None, 0))(theta, samples)

    def new_buffer(self, rows, steps, generator):
        buffer = super().new_buffer(rows, steps, generator)
        buffer.stored["weights"] = self.theta.repeat(rows, 1)  # (R, P): theta, and later theta'
        return buffer

    def act(self, buffer, t, sample):
        """Explore with theta, then act with theta'. The value is 0: MAML has its own baseline."""
        num_exploring = self.config.episodes_per_trial - 1
        done = buffer.eta[:, :t] > 0
        episode = done.sum(dim=1)  # (R,)

        # The inner step of the rows whose last exploring episode ended with the previous step (none
        # at t = 0). All their steps so far are exploring ones.
        adapts_now = (episode == num_exploring) & done[:, -1:].any(dim=1)
        if adapts_now.any():
            exploring = Phase(buffer, adapts_now, mask=torch.ones_like(done[adapts_now]))
            inner_samples = exploring.to_samples(self.betas[0], self.config)
            buffer.stored["weights"][adapts_now] = self.adapt(self.theta, inner_samples)

        # Every row acts with its own weights.
        mean, log_std = vmap(self.policy)(buffer.stored["weights"], buffer.state[:, t])
        noisy = (episode < num_exploring) | sample
        action = mean + log_std.exp() * buffer.noise[:, t] * noisy[:, None]
        return action, trmrl.gaussian_log_prob(mean, log_std, action), torch.zeros_like(mean[:, 0])

    def update(self, buffer, optimizer, generator):
        """One outer step, by TRPO; the optimizer and the generator are not used.

        maximise  J(theta'), averaged over tasks, where theta' depends on theta
        within    KL(old policy of theta' || new one), averaged over tasks,  <=  max_kl
        """
        config = self.config
        done = buffer.eta.long()
        episode = done.cumsum(dim=1) - done  # done 0 1 0 1: episode 0 0 1 1
        is_exploring = episode < config.episodes_per_trial - 1  # (R, T)
        exploring = Phase(buffer, slice(None), mask=is_exploring)  # all rows
        adapted = Phase(buffer, slice(None), mask=~is_exploring)
        inner_samples = exploring.to_samples(self.betas[0], config)
        outer_samples = adapted.to_samples(self.betas[1], config)

        # The inner step of `act` once more, but as a function of theta: the outer gradient passes
        # through it. At the present theta it gives the policies that acted, but for rounding.
        def adapted_policies(theta):
            """Mean (R, C, A) and log_std (R, A)."""
            return vmap(self.policy)(self.adapt(theta, inner_samples), outer_samples.state)

        old_policies = adapted_policies(self.theta)

        def objective(theta):
            """The surrogate of what the adapted policies earn, averaged over tasks."""
            return vmap(surrogate)(*adapted_policies(theta), outer_samples).mean()

        def kl(theta):
            """How far the adapted policies have moved, averaged over tasks."""
            new_policies = adapted_policies(theta)
            return vmap(kl_divergence)(*old_policies, *new_policies, outer_samples).mean()

        new_theta, metrics = trpo_step(objective, kl, self.theta, config.max_kl)
        nn.utils.vector_to_parameters(new_theta, self.parameters())

        # Fit the value baselines of the next batch. Its states will be normalised with the
        # statistics updated below, these with the old ones: this matters only early in training.
        self.betas[0] = fit_baseline(exploring, config.gamma)
        self.betas[1] = fit_baseline(adapted, config.gamma)
        self.normalizer.update(buffer.raw_state[:, :-1].flatten(0, 1))

        returns, _ = trmrl.episode_results(buffer, config.episodes_per_trial)
        return metrics | {
            "return_before": returns[:, 0].mean(),  # of the first episode
            "return_after": returns[:, -1].mean(),  # of the first adapted one
            "std": self.log_std.exp().mean().item(),
            "updates": 1,
        }

    def parameter_groups(self):
        """A Run needs an optimizer; this one takes no step."""
        return [dict(params=list(self.parameters()), lr=self.config.lr)]


# ---- TRPO (Schulman et al. 2015) -----------------------------------------------------------------


def conjugate_gradients(product, b):
    """Solve H x = b for x, where product(v) is H v."""
    x = torch.zeros_like(b)
    residual = direction = b
    residual_square = residual.dot(residual)
    for _ in range(CG_ITERATIONS):
        H_direction = product(direction)
        step_size = residual_square / (direction.dot(H_direction) + 1e-20)
        x = x + step_size * direction
        residual = residual - step_size * H_direction
        old_square = residual_square
        residual_square = residual.dot(residual)
        direction = residual + residual_square / (old_square + 1e-20) * direction
    return x


def trpo_step(objective, kl, theta, max_kl):
    """Increase objective(theta) within kl(theta) <= max_kl: the new theta and metrics.

    A small step x raises the objective by about g.x and the KL divergence by x.Hx / 2, where g is
    the gradient of the former and H the Hessian of the latter, here with DAMPING added to its
    diagonal, which shortens the step. Within the bound the best x is
    sqrt(2 max_kl / g.H^-1 g) H^-1 g. H is too large to be written down, but conjugate gradients
    need only its products with vectors.
    """
    g = grad(objective)(theta)
    if not g.isfinite().all():
        raise trmrl.UserError("the gradient is not finite; start again with a lower --inner-lr")
    _, hessian_product = vjp(grad(kl), theta)  # v -> v.H, which is H v: H is symmetric
    H_inverse_g = conjugate_gradients(lambda v: hessian_product(v)[0] + DAMPING * v, g)
    step = (2 * max_kl / (g.dot(H_inverse_g) + 1e-20)).sqrt() * H_inverse_g

    # Both approximations hold near theta only: shorten the step until it really is an improvement.
    before = objective(theta)
    for fraction in STEP_FRACTIONS:
        candidate = theta + fraction * step
        gain = (objective(candidate) - before).item()
        distance = kl(candidate).item()
        if gain > 0 and distance <= max_kl:
            return candidate, {"gain": gain, "kl": distance, "step_fraction": fraction}
    return theta, {"gain": 0.0, "kl": 0.0, "step_fraction": 0.0}


# ---- Phases and the value baseline ---------------------------------------------------------------
#
# Details, which you can skip at first. The value of a state in a phase with mean reward m is
#
#     V(s) = m / (1 - gamma) + features(s, time, m) . beta
#
# The features are those of "Benchmarking Deep RL for Continuous Control" (Duan et al. 2016), and
# the product of m and s. The usual code fits beta to the 20 or 40 episodes of a task. Fitted to our
# one or two, it would explain the noise away, so we fit it to all tasks of the last batch. m is a
# hint of the task: a velocity, say, is worth more in one task than in another. Since m depends on
# the actions, it biases the gradient slightly.


class Phase:
    """Some rows of a buffer, and mask (R, T), which is true at the steps of one phase.

    T may be shorter than the rows of the buffer: `act` has only the steps so far.
    """

    def __init__(self, buffer, rows, mask):
        T = mask.shape[1]
        self.mask = mask
        self.state = buffer.state[rows, :T]
        self.action = buffer.action[rows, :T]
        self.log_prob = buffer.log_prob[rows, :T]
        self.reward = buffer.reward[rows, :T]
        self.terminated = buffer.terminated[rows, :T]
        self.ends = buffer.eta[rows, :T] > 0
        self.ends[:, -1] = True  # nothing follows the last step, even within an episode
        # Of the selected steps, (R, 1) each. mean_reward is m in the comment above.
        self.count = mask.sum(dim=1, keepdim=True)
        self.mean_reward = (self.reward * mask).sum(dim=1, keepdim=True) / self.count

    def to_samples(self, beta, config):
        """The Samples of this phase; advantages are relative to the value baseline beta."""
        step_weight = self.mask / self.count
        advantage = baseline_advantages(self, beta, config.gamma, config.gae_lambda)
        advantage = advantage - (step_weight * advantage).sum(dim=1, keepdim=True)
        variance = (step_weight * advantage**2).sum(dim=1, keepdim=True)
        advantage = advantage / (variance.sqrt() + 1e-8)

        samples = Samples(self.state, self.action, self.log_prob, advantage, step_weight)
        needed = self.mask.any(dim=0)  # columns that no row needs are left out
        return Samples(*(x[:, needed] for x in samples))


def baseline_features(phase):
    """What the baseline is linear in, (R, T, D): D = 3 S + 4."""
    # The time since the episode began, in units of 100 steps. Ends 0 1 0 1: began 0 0 2 2.
    t = torch.arange(phase.ends.shape[1], device=phase.ends.device)
    began = (phase.ends * (t + 1)).cummax(dim=1).values.roll(1, dims=1)
    began[:, 0] = 0
    time = (t - began)[..., None] / 100

    task_hint = phase.mean_reward[..., None] * phase.state
    time_features = [time, time**2, time**3, torch.ones_like(time)]
    return torch.cat([phase.state, phase.state**2, task_hint, *time_features], dim=-1)


def baseline_advantages(phase, beta, gamma, lam):
    """GAE with the baseline whose weights are beta (D,): (R, T)."""
    value = phase.mean_reward / (1 - gamma) + baseline_features(phase) @ beta
    # Where an episode terminates, the next value is 0. At a time limit the next state in the row
    # belongs to another episode, and a Phase does not hold s_T: there we take V(s_t).
    next_value = torch.where(phase.ends, value, value.roll(-1, dims=1))
    next_value = next_value.masked_fill(phase.terminated, 0.0)
    return trmrl.gae(phase.reward, value, next_value, phase.ends, gamma, lam)


def fit_baseline(phase, gamma):
    """beta (D,) by ridge regression over the selected steps of all rows."""
    X = baseline_features(phase)[phase.mask]
    M, D = X.shape
    # With beta = 0 and lambda = 1 these are discounted returns less m / (1 - gamma); after a time
    # limit, m is earned forever.
    y = baseline_advantages(phase, X.new_zeros(D), gamma, lam=1.0)[phase.mask]
    ridge = RIDGE * torch.eye(D, device=X.device)
    return torch.linalg.solve(X.T @ X / M + ridge, X.T @ y / M)


if __name__ == "__main__":
    sys.exit(trmrl.main(agent_class=MAML))
