"""Implicit process reward: the log-ratio of a policy that is trained on outcomes to its reference.

    r_t  = beta * sum over the action tokens of turn t of (log pi_prm - log pi_ref)
    R    = sum_t r_t
    loss = mean over episodes of -(y log sigmoid(R) + (1 - y) log(1 - sigmoid(R)));  y: the outcome in [0, 1]

So the scores of turns come from labels of whole episodes (PRIME, arXiv 2502.01456; iStar, arXiv 2509.19199,
trains a similar model on preferred pairs of episodes). pi_prm starts as the starting model, which is also
pi_ref: all scores are 0 until its first step. After each update of A it is trained on A's episodes by one
optimizer step. A score is any real number.

The gradient of the loss is that of a policy gradient in which every action token of an episode has the
advantage beta (y - sigmoid(R)). R is computed first, without a graph, so the rows of an episode need not fit
into one micro-batch.

Left out: training on B's episodes, several steps per update, balancing solved and unsolved episodes, and
mixing the scores with the outcome.

Shapes: E episodes.
"""

from __future__ import annotations

import itertools
import math
import random

import torch

import losses
from batch import Row, rows_of
from buffer import Group, Trajectory
from config import Config
from dense.scores import set_scores
from policy import Policy
from record.reward_fit import area_under_roc
from rspo import batches_of, local_rows, score_rows
from scale import distributed


class ImplicitReward:
    """Scores turns with an agent of its own, pi_prm, and trains it on the outcomes of A's episodes."""

    def __init__(self, agent: Policy, beta: float, config: Config):
        """agent: pi_prm, with the weights of the starting model and its own AdamW."""
        self.agent, self.beta, self.config = agent, beta, config

    def score(self, groups: list[Group], noise: float = 0.0, rng: random.Random | None = None) -> None:
        """Set `dense_score` of every step of every usable episode. noise: see `set_scores`.

        Ranks share the rows. Raises FloatingPointError if a score is not a finite number.
        """
        episodes = [episode for group in groups for episode in group.usable_episodes()]
        scores, _ = self.step_scores(episodes)
        by_episode = {id(episode): own for episode, own in zip(episodes, scores, strict=True)}
        set_scores(groups, lambda episode: by_episode[id(episode)], noise, rng)

    def step_scores(self, episodes: list[Trajectory]) -> tuple[list[list[float]], list[list[Row]]]:
        """Return r_t of each step of each episode, and the rows of each episode.

        Equal rows are scored once. The scores of equal rows in two batches could differ by rounding, and the
        division by a group's tiny standard deviation would turn that difference into large advantages.
        """
        rows = [rows_of(episode) for episode in episodes]
        distinct = {_content(row): row for row in itertools.chain(*rows)}
        for column in ("old_logprobs", "ref_logprobs"):  # of pi_prm and of pi_ref
            score_rows(self.agent, list(distinct.values()), column, self.config)
        read = {content: self._scores_of(row) for content, row in distinct.items()}
        scores = [list(itertools.chain(*(read[_content(row)] for row in own))) for own in rows]
        return scores, rows

    def _scores_of(self, row: Row) -> list[float]:
        ratios = (row.old_logprobs - row.ref_logprobs).double()
        return [self.beta * ratios[start:end].sum().item() for _, start, end in row.spans]

    def learn(self, groups: list[Group]) -> dict[str, float]:
        """Train pi_prm by one optimizer step on the outcomes of these groups, which A has just played.

        Returns the loss, the mean of R and, if there are solved and unsolved episodes, the AUC with which R
        ranks the solved ones above the others. All are computed before the step, so pi_prm has not been
        trained on these episodes yet. Raises FloatingPointError if R or the gradient is not finite.
        """
        episodes = [episode for group in groups for episode in group.usable_episodes()]
        scores, rows = self.step_scores(episodes)
        returns = [sum(own) for own in scores]
        if not all(math.isfinite(value) for value in returns):
            raise FloatingPointError("a score of the implicit reward is not a number: lower --implicit_lr")
        outcomes = [episode.outcome for episode in episodes]
        loss, weights = cross_entropy(returns, outcomes)
        for own, weight in zip(rows, weights, strict=True):
            for row in own:
                row.advantages = self.beta * weight * row.action_mask
        self._step(list(itertools.chain(*rows)), len(episodes))
        metrics = {"implicit_loss": loss, "implicit_return": sum(returns) / len(returns)}
        auc = area_under_roc(returns, [episode.success for episode in episodes])
        return metrics if auc is None else metrics | {"implicit_auc": auc}

    def _step(self, rows: list[Row], n_episodes: int) -> None:
        """Add the gradient of the loss over all rows, which ranks share, and step AdamW."""
        for batch in batches_of(self.agent, [rows[i] for i in local_rows(rows)], self.config):
            logprobs, _ = self.agent.logprobs(batch)
            token_losses = -batch.column("advantages") * logprobs
            losses.masked_mean(token_losses, batch.action_mask, n_episodes).backward()
        distributed.sum_gradients(self.agent.parameters)
        self.agent.step(self.config.max_grad_norm)

    def state_dicts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return all that a resumed run needs, by the name of its file in a checkpoint."""
        return {self.agent.name: self.agent.state_dict()}


def cross_entropy(returns: list[float], outcomes: list[float]) -> tuple[float, list[float]]:
    """Return the mean cross-entropy of sigmoid(R) to the outcomes (E,), and outcome - sigmoid(R) of each."""
    r, y = torch.tensor(returns, dtype=torch.double), torch.tensor(outcomes, dtype=torch.double)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(r, y)
    return loss.item(), (y - torch.sigmoid(r)).tolist()


def _content(row: Row) -> tuple:
    """Return the tokens of a row and its spans without the step numbers. Equal content has equal scores."""
    return tuple(row.input_ids), tuple((start, end) for _, start, end in row.spans)
