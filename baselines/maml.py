# SPDX-License-Identifier: MIT
"""MAML: "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks" (Finn et al. 2017).

MAML learns initial weights theta from which one step of policy gradient adapts to a new task. In
the exploring phase of a trial, its first E - 1 episodes, the agent acts with theta. In the adapted
phase ("post-update" in Finn et al.), it acts with theta', the result of one inner step on what it
has seen:

    theta' = theta + alpha grad J_exploring(theta),    alpha: --inner-lr

J is the mean, over the steps of a phase, of advantage * pi / pi_old, where pi_old is the policy
that acted. Where pi is pi_old, grad J is the policy gradient. Advantages are standardised per task,
so that one alpha suits all scales of reward. An outer step increases the mean over tasks of
J_adapted(theta'). Its gradient with respect to theta passes through the inner step, so MAML needs
second derivatives. The outer step is TRPO's: to first order, the one that raises the objective most
while the adapted policies stay close to the old ones, in KL divergence.

In code: `act` is called at each step of a trial, and after E - 1 episodes it takes the inner step,
`adapt`. After the trials, `update` repeats `adapt` as a function of theta for the outer step.

    python -m baselines.maml --env halfcheetah_vel

The policy has no memory. A policy gradient needs sampled actions, so the agent samples while it
explores, even in a meta-test that otherwise takes mean actions.

The main difference from Finn et al. is the amount of data. Theirs, per iteration: 40 tasks, with 20
episodes each for the inner step and 20 for the outer one (on AntDir, 40 and 40). Ours: 20 tasks
(ML45: 45), with E - 1 episodes (by default two) for the inner step and the rest of the row, usually
one episode, for the outer. TRPO is damped far more than theirs. docs/differences.md lists the
others.

Shapes: R rows of T steps, each row a trial; C columns of a phase (see Phase); S and A, the sizes of
a state and an action; P weights of the policy, log_std included, as one vector; D features of the
value baseline.

The agent comes first, then how the standardised advantages of a phase are made, then TRPO.
"""

import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

# grad(f)(x, y) is the gradient of f with respect to x. vmap(f) applies f to each row of tensors, or
# of tuples of tensors. functional_call runs a module with other weights. vjp(f, x) returns f(x) and
# a function v -> (v^T df/dx,), a tuple of one.
from torch.func import functional_call, grad, vjp, vmap

import trmrl
from baselines import NOT_FLAGS
from trmrl import setting

# Unused settings, most of them of PPO and its Adam.
UNUSED = ("d_model", "clip", "epochs", "minibatch", "lr", "value_lr", "final_lr", "max_grad_norm")

# A Run builds an Adam, which is never used; its lr of 0 is in progress.csv.
COMMON = dict(episodes_per_trial=3, lr=0.0)
PRESETS = {env: preset | COMMON for env, preset in trmrl.PRESETS.items()}
# The half-cheetah, the only environment tuned: more steps than TrMRL's, as the policy gradient is
# noisy; a larger std, to explore more; a higher lambda, as the value baseline is crude.
PRESETS["halfcheetah_vel"] |= dict(total_steps=5_000_000, init_std=0.5, gae_lambda=0.95)


@dataclass
class Config(trmrl.Config):
    presets = PRESETS
    not_flags = (*NOT_FLAGS, *UNUSED)
    one_process = True  # `update` does not average over processes

    episodes_per_trial: int = setting("training", None, "E; the first E - 1 explore", low=2)
    # There is no memory to keep: this only puts the E episodes of a trial into one row.
    keep_memory: bool = setting("agent", True, "a row is a whole trial")
    inner_lr: float = setting("MAML", 0.1, "alpha, learning rate of the inner step", high=1000)
    max_kl: float = setting("MAML", 0.05, "largest KL divergence of an outer step", low=1e-6)


# ---- The agent -----------------------------------------------------------------------------------

EXPLORING, ADAPTED = 0, 1  # the phases of a trial


class Steps(NamedTuple):
    """What MAML reads of a buffer: the first T steps of some of its rows."""

    state: torch.Tensor  # (R, T, S)
    action: torch.Tensor  # (R, T, A)
    log_prob: torch.Tensor  # (R, T), as are the following
    reward: torch.Tensor
    eta: torch.Tensor
    terminated: torch.Tensor

    @property
    def ends(self):
        """True at the last step of each episode; the last column always counts as an end.

        The policy has no memory, so each episode is a trajectory of its own, while
        Buffer.trajectory_ends would join those of a row.
        """
        ends = self.eta > 0
        ends[:, -1] = True
        return ends


def first_steps(buffer, rows, T):
    """The first T steps of the rows that `rows`, a mask or a slice, selects."""
    return Steps(*(getattr(buffer, name)[rows, :T] for name in Steps._fields))


class Phase(NamedTuple):
    """Those of the Steps that belong to one phase; inside vmap, of one row (then R is absent).

    Where episodes end early, as on the ant, a phase covers different columns in different rows. The
    C columns are those that at least one row uses. Where a row does not, step_weight is 0.
    """

    state: torch.Tensor  # (R, C, S)
    action: torch.Tensor  # (R, C, A)
    old_log_prob: torch.Tensor  # (R, C), when the action was taken
    advantage: torch.Tensor  # (R, C), standardised in each row
    step_weight: torch.Tensor  # (R, C), a step's weight in a mean over the phase: 1 / steps, or 0


class MAML(trmrl.Agent):
    """A policy without memory; one gradient step adapts its weights to a new task."""

    name = "maml"
    command = "python -m baselines.maml"
    Config = Config

    def __init__(self, config, sizes):
        S, _, _ = sizes
        super().__init__(config, sizes, e_size=S)
        self.exploring_episodes = config.episodes_per_trial - 1  # episodes before the inner step
        self.scored_episode = config.episodes_per_trial  # the first after the inner step
        # A linear value baseline, fitted in closed form, replaces the value head, as in Finn et al.
        # It has one row of weights for each phase; D = 3 S + 4, see baseline_inputs.
        self.register_buffer("betas", torch.zeros(2, 3 * S + 4))
        self.value_head = nn.Identity()  # Agent.parameter_groups expects one; it has no weights

    @property
    def theta(self):
        """The meta-learned weights, with which every trial begins, as one vector, (P,)."""
        return nn.utils.parameters_to_vector(self.parameters()).detach()

    def policy(self, weights, state):
        """Mean (..., A) and log_std (A,) of the policy whose weights are (P,)."""
        # parameters() yields log_std first, then those of the policy head.
        log_std, *head = weights.split([p.numel() for p in self.parameters()])
        pairs = zip(self.policy_head.named_parameters(), head)
        named_weights = {name: part.view_as(p) for (name, p), part in pairs}
        return functional_call(self.policy_head, named_weights, (state,)), log_std

    def J(self, weights, phase):
        """J of a policy in one row of a phase: the mean of advantage * pi(a|s) / pi_old(a|s).

        Finn et al. have log pi in the inner step, instead of the ratio. Where pi is pi_old, that
        has the same gradient, but another Hessian. The ratio adds advantage * grad log pi (grad log
        pi)^T to it, which credits exploring actions for improving the adapted policy. ProMP has the
        same term; docs/differences.md derives it.
        """
        mean, log_std = self.policy(weights, phase.state)
        log_prob = trmrl.gaussian_log_prob(mean, log_std, phase.action)
        ratio = (log_prob - phase.old_log_prob).exp()
        # step_weight makes the sum a mean.
        return (phase.step_weight * phase.advantage * ratio).sum()

    def adapt(self, theta, exploring):
        """The inner step of all given rows at once, theta' (R, P). log_std is adapted, too."""
        # theta is shared (None), the phase is split by row (0). torch.func.grad works even where
        # gradients are switched off, as when the agent acts.
        gradient = vmap(grad(self.J), in_dims=(None, 0))(theta, exploring)
        return theta + self.config.inner_lr * gradient

    def new_buffer(self, rows, steps, generator):
        buffer = super().new_buffer(rows, steps, generator)
        buffer.stored["weights"] = self.theta.repeat(rows, 1)  # (R, P): theta, and later theta'
        return buffer

    def phase_mask(self, steps, phase_id):
        """Whether each of the steps belongs to the phase, EXPLORING or ADAPTED: (R, T)."""
        done = steps.eta.long()
        episode = done.cumsum(dim=1) - done  # done 0 1 0 1: episode 0 0 1 1
        explores = episode < self.exploring_episodes
        return explores if phase_id == EXPLORING else ~explores

    def phase_of(self, steps, phase_id):
        """The Phase of the steps that belong to EXPLORING or ADAPTED."""
        return make_phase(
            self.config, steps, self.phase_mask(steps, phase_id), self.betas[phase_id]
        )

    def act(self, buffer, t, sample):
        """Explore with theta, then act with theta'. The value is 0: MAML has its own baseline."""
        done = buffer.eta[:, :t] > 0  # (R, t)
        episode = done.sum(dim=1)  # (R,), the number of the current episode, from 0

        # The inner step of the rows whose last exploring episode ended with the previous step. (If
        # `act` is called twice for this t, theta' is the same: it is made from theta.)
        just_ended = done[:, -1:].any(dim=1)  # false at t = 0, when there are no columns
        ready = just_ended & (episode == self.exploring_episodes)
        if ready.any():
            exploring = self.phase_of(first_steps(buffer, ready, t), EXPLORING)
            buffer.stored["weights"][ready] = self.adapt(self.theta, exploring)

        # Every row acts with its own weights.
        mean, log_std = vmap(self.policy)(buffer.stored["weights"], buffer.state[:, t])
        noisy = (episode < self.exploring_episodes) | sample
        noise = buffer.noise[:, t] * noisy[:, None]
        action = mean + log_std.exp() * noise
        no_value = torch.zeros_like(mean[:, 0])
        return action, trmrl.gaussian_log_prob(mean, log_std, action), no_value

    def update(self, buffer, optimizer, generator):
        """One outer step, by TRPO; the optimizer and the generator are not used.

        maximise      J_adapted(theta'), averaged over tasks
        subject to    KL(old adapted policy || new one), averaged over tasks,  <=  max_kl

        The objective and the KL divergence are functions of theta, on the experience collected with
        the present theta and theta'.
        """
        steps = first_steps(buffer, slice(None), buffer.reward.shape[1])  # all steps of all rows
        exploring, adapted = self.phase_of(steps, EXPLORING), self.phase_of(steps, ADAPTED)

        # The inner step of `act` once more, but as a function of theta: the outer gradient passes
        # through it, which brings in second derivatives. At the present theta, it gives the weights
        # that acted, up to rounding.
        def theta_prime(theta):
            return self.adapt(theta, exploring)

        def adapted_policies(theta):
            """Their mean (R, C, A) and log_std (R, A)."""
            return vmap(self.policy)(theta_prime(theta), adapted.state)

        old_policies = adapted_policies(self.theta)

        def objective(theta):
            return vmap(self.J)(theta_prime(theta), adapted).mean()

        def kl(theta):
            new_policies = adapted_policies(theta)
            return vmap(kl_divergence)(*old_policies, *new_policies, adapted.step_weight).mean()

        new_theta, metrics = trpo_step(objective, kl, self.theta, self.config.max_kl)
        nn.utils.vector_to_parameters(new_theta, self.parameters())

        # Fit the value baselines for the next batch and meta-test. There, new statistics of states
        # also change policies and baselines, which the KL bound does not cover. The change is large
        # after the first iteration, in which states are not normalised yet, and then shrinks.
        for phase_id in (EXPLORING, ADAPTED):
            mask = self.phase_mask(steps, phase_id)
            self.betas[phase_id] = fit_baseline(self.config, steps, mask)
        self.normalizer.update(buffer.raw_state[:, :-1].flatten(0, 1))

        returns, _ = trmrl.episode_results(buffer, self.config.episodes_per_trial)
        return metrics | {
            "return_before": returns[:, 0].mean(),  # of the first exploring episode
            "return_after": returns[:, self.exploring_episodes].mean(),  # of the first adapted one
            "std": self.log_std.exp().mean().item(),
            "updates": 1,
        }


# ---- Phases and their advantages -----------------------------------------------------------------
#
# Advantages are relative to a value baseline. All tasks share it, but a state is worth more in a
# task that pays more. So the baseline also gets m, the mean reward of the row in this phase:
#
#     V(s) = m / (1 - gamma) + features . beta
#     features = [s, s^2, m s, time, time^2, time^3, 1]
#     time = (steps since the episode began) / 100
#
# m / (1 - gamma) is the value of earning m at every step, forever: already in the first iteration,
# in which beta is 0, the level of V is about right for each task. Later, each phase has its own
# beta, fitted to all tasks of the previous iteration. The authors of MAML fit one beta to each
# task, to its 20 or 40 episodes; with so few episodes as here, it would overfit. But m depends on
# the actions, so using it biases the gradient.
#
# Unlike in trmrl.py, rewards are not scaled: the baseline, fitted in closed form, suits any scale.

RIDGE = 1e-3  # the weight of |beta|^2 in the regression


def make_phase(config, steps, mask, beta):
    """The Phase of those steps where mask, (R, T), is true: in each row, of one step at least."""
    constant_value, features = baseline_inputs(config, steps, mask)
    value = constant_value + features @ beta
    advantage = raw_advantages(config, steps, value, config.gae_lambda)

    # Standardise in each row. Everything so far was computed for all steps; those outside the phase
    # have weight 0.
    step_weight = mask / mask.sum(dim=1, keepdim=True)
    advantage = advantage - (step_weight * advantage).sum(dim=1, keepdim=True)
    variance = (step_weight * advantage**2).sum(dim=1, keepdim=True)
    advantage = advantage / (variance.sqrt() + 1e-8)

    phase = Phase(steps.state, steps.action, steps.log_prob, advantage, step_weight)
    used = mask.any(dim=0)  # (T,): drop the other columns, to save time
    return Phase(*(x[:, used] for x in phase))


def fit_baseline(config, steps, mask):
    """beta (D,) by ridge regression over the steps of a phase."""
    constant_value, features = baseline_inputs(config, steps, mask)
    # What features . beta should explain: the discounted return, bootstrapped with constant_value
    # at a time limit, minus constant_value. This is GAE with lambda = 1.
    target = raw_advantages(config, steps, constant_value, lam=1.0)
    X, y = features[mask], target[mask]  # (n, D), (n,)
    n, D = X.shape
    ridge = RIDGE * torch.eye(D, device=X.device)
    return torch.linalg.solve(X.T @ X / n + ridge, X.T @ y / n)


def baseline_inputs(config, steps, mask):
    """m / (1 - gamma), (R, T), and the features, (R, T, D)."""
    state = steps.state
    m = (steps.reward * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
    time = time_in_episode(steps.ends)[..., None] / 100
    time_features = [time, time**2, time**3, torch.ones_like(time)]
    features = torch.cat([state, state**2, m[..., None] * state, *time_features], dim=-1)
    return (m / (1 - config.gamma)).expand_as(steps.reward), features


def raw_advantages(config, steps, value, lam):
    """GAE of all steps, given their values, (R, T). Episodes are separate, so phases are, too."""
    # Where an episode terminates, the next value is 0. At a time limit, the buffer has lost the
    # next state (it has the first one of the next episode). There and, for simplicity, at the end
    # of a row, we take V(s_t).
    next_value = torch.where(steps.ends, value, value.roll(-1, dims=1))
    next_value = next_value.masked_fill(steps.terminated, 0.0)
    return trmrl.gae(steps.reward, value, next_value, steps.ends, config.gamma, lam)


def time_in_episode(ends):
    """The steps since the episode began, (R, T). Where ends is 0 0 1 0 1, they are 0 1 2 0 1."""
    t = torch.arange(ends.shape[1], device=ends.device)
    # The step after an end begins an episode. (What roll wraps to t = 0 is multiplied by 0.)
    began = (ends.roll(1, dims=1) * t).cummax(dim=1).values  # 0 0 0 3 3
    return t - began


# ---- TRPO (Schulman et al. 2015) -----------------------------------------------------------------

CG_ITERATIONS = 10  # of conjugate gradients
DAMPING = 0.3  # added to the diagonal of F, the Hessian of the KL divergence (the authors: 1e-5)
STEP_FRACTIONS = [0.8**i for i in range(15)]  # of the TRPO step, tried in turn


def kl_divergence(old_mean, old_log_std, new_mean, new_log_std, step_weight):
    """KL(old || new) of two Gaussian policies, averaged over the steps of a phase in one row."""
    # E[(a - new_mean)^2] of actions a of the old policy
    second_moment = (2 * old_log_std).exp() + (old_mean - new_mean) ** 2
    kl = new_log_std - old_log_std + 0.5 * second_moment / (2 * new_log_std).exp() - 0.5
    return (step_weight * kl.sum(dim=-1)).sum()


def conjugate_gradients(F_times, b):
    """Solve F x = b approximately, where F_times(v) is F v.

    x minimises x^T F x / 2 - b^T x. Each direction d is conjugate to every earlier one e, that is,
    d^T F e = 0. So a step along d leaves x optimal along e.
    """
    x, residual, direction = torch.zeros_like(b), b, b
    for _ in range(CG_ITERATIONS):
        old_square = residual.dot(residual)
        if old_square < 1e-20:  # solved
            break
        F_direction = F_times(direction)
        step_size = old_square / direction.dot(F_direction)
        x = x + step_size * direction
        residual = residual - step_size * F_direction
        direction = residual + residual.dot(residual) / old_square * direction
    return x


def trpo_step(objective, kl, theta, max_kl):
    """Increase objective(theta) within kl(theta) <= max_kl. Returns the new theta and metrics.

    For a small step x (`step` below), the objective rises by about g^T x (g: its gradient), and KL,
    which is 0 and least at theta, becomes about x^T F x / 2 (F: its Hessian, a Fisher matrix).
    Within the bound, the best x is sqrt(2 max_kl / g^T F^-1 g) F^-1 g. Conjugate gradients find
    F^-1 g (`ascent`) from products of F with vectors, without F itself.

    F is nearly zero along many directions, in which x would go far, so DAMPING is added to its
    diagonal: in effect, the bound is on KL + DAMPING |x|^2 / 2. Along such directions, the step is
    one of plain gradient ascent.
    """
    g = grad(objective)(theta)
    # kl contains the inner step, so its Hessian contains third derivatives. Their term vanishes at
    # theta, where the gradient of KL with respect to theta' is 0.
    _, v_times_F = vjp(grad(kl), theta)  # v -> (v^T F,)

    def damped_F_times(v):
        return v_times_F(v)[0] + DAMPING * v  # F is symmetric: v^T F is F v

    ascent = conjugate_gradients(damped_F_times, g)
    step = (2 * max_kl / (g.dot(ascent) + 1e-20)).sqrt() * ascent
    if not step.isfinite().all():  # else the line search would keep theta and say nothing
        raise trmrl.UserError("the outer step is not finite; start again with a lower --inner-lr")

    # Both approximations hold near theta only: shorten the step until it really stays within the
    # bound and improves the objective. If none does, keep theta.
    before = objective(theta)  # about 0, as advantages are standardised
    for fraction in STEP_FRACTIONS:
        candidate = theta + fraction * step
        gain = (objective(candidate) - before).item()
        divergence = kl(candidate).item()
        if gain > 0 and divergence <= max_kl:
            return candidate, {"gain": gain, "kl": divergence, "step_fraction": fraction}
    return theta, {"gain": 0.0, "kl": 0.0, "step_fraction": 0.0}


if __name__ == "__main__":
    sys.exit(trmrl.main(agent_class=MAML))
