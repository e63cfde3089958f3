"""GRPO: one RL step from completions to a better policy (DeepSeekMath, arXiv 2402.03300; the options of DAPO,
arXiv 2503.14476).

**Which policy is the old one.** The surrogate compares the policy with the one that answers are held to come
from:

- One update a step (`epochs` = `minibatches` = 1) on answers of the current version: the old log-probabilities
  are those of the update's own forward pass, detached. The ratio is 1 to the bit and the gradient is plain
  policy gradient. The rollout's `policy_logprobs` describe the same weights, but another kernel computed them,
  and their rounding would show as a ratio that is noise; `rollout_gap_*` reports that difference.
- Several updates: the learner computes the log-probabilities of the whole step before the first one, in the
  same micro-batches, so that the ratio of the first update is 1 to the bit, and later ones measure how far the
  step went.
- Answers of an older version (`max_staleness` > 0): the rollout's `policy_logprobs`, so that the clip bounds
  the distance from the policy that wrote them. With `tis_cap` they are treated like fresh ones, and the
  importance weight corrects for their origin instead (decoupled, as in AReaL, arXiv 2505.24298).

**Reproducible to the bit**, with the same number of threads: answers are sorted by request id and cut into
micro-batches by length alone, and gradients are added up in that order. The state (weights, moments,
counters) is all that a step depends on, so a resumed run goes on as if nothing had happened.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tlt_pipeline.config import LearnerConfig
from tlt_pipeline.learner.answers import Answer, prepare_answers, split_minibatches, token_data
from tlt_pipeline.learner.batching import MicroBatch, bucket, collate
from tlt_pipeline.learner.compute import choose_scoring
from tlt_pipeline.learner.losses import Objective, TokenData, answer_weights, policy_loss
from tlt_pipeline.learner.metrics import Measured, StepMetrics, summarize
from tlt_pipeline.learner.optimizer import make_optimizer, update, warm_up
from tlt_pipeline.learner.scoring import Scored, backpropagate, score_answers
from tlt_pipeline.messages import Completion
from tlt_pipeline.models.decoder import Decoder


class StepInterrupted(RuntimeError):
    """Training was asked to stop in mid-step; the step counts for nothing."""


class Trainer:
    """Holds the policy, its optimizer and, with `kl_coef` > 0, the reference policy.

    `version` counts trained steps and is the version of the policy held; `updates` counts optimizer steps.
    `intact` is False while the policy is between two versions: such a state must not be saved."""

    def __init__(
        self,
        config: LearnerConfig,
        policy: Decoder,
        seed: int,
        *,
        temperature: float = 1.0,
        version: int = 0,
        reference: Decoder | None = None,
    ) -> None:
        """`policy` is trained in place, in float32. `reference`: the starting policy, needed where training
        goes on from a later version; a copy of `policy` otherwise."""
        entropy = "gradient" if config.entropy_coef != 0 else "value"
        self.config = config
        self.scoring = choose_scoring(config.device, config.dtype, temperature, entropy)
        self.policy = policy.to(self.scoring.device, torch.float32)
        self.optimizer = make_optimizer(policy, config.lr, config.weight_decay, config.betas)
        self.seed = seed
        self.version = version
        self.updates = 0
        self.intact = True
        self._reference: Decoder | None = None
        if config.kl_coef > 0:
            held = copy.deepcopy(policy) if reference is None else reference
            self._reference = held.to(self.scoring.device, torch.float32).requires_grad_(False)
        self._objective = Objective(
            config.clip_low, config.clip_high, config.kl_coef, config.entropy_coef, config.tis_cap
        )

    def train_step(self, completions: Sequence[Completion], stop: Callable[[], bool] = lambda: False) -> StepMetrics:
        """Trains one step and moves to the next version. Where every group is left out (all rewards equal),
        the weights stay and the version still moves.

        Raises BadCompletion; NonFiniteUpdate if loss or gradient is NaN or infinite; StepInterrupted once
        `stop()` says so. Afterwards `intact` tells whether the state is still that of `version`."""
        began = time.monotonic()
        answers, left_out = prepare_answers(completions, self.config.normalize_std, self.version)
        measured = Measured()
        try:
            self._look_ahead(answers, stop)
            for epoch in range(self.config.epochs if answers else 0):
                for minibatch in self._minibatches(answers, epoch):
                    self._update(minibatch, measured, first=epoch == 0, stop=stop)
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
            raise
        self.version += 1
        self.intact = True
        return summarize(completions, measured, left_out, self.version - 1, time.monotonic() - began)

    def _minibatches(self, answers: Sequence[Answer], epoch: int) -> list[list[Answer]]:
        return split_minibatches(answers, self.config.minibatches, f"{self.seed}/{self.version}/{epoch}")

    def _look_ahead(self, answers: Sequence[Answer], stop: Callable[[], bool]) -> None:
        """Fills in what must be known of the answers before the first update."""
        several = self.config.epochs * self.config.minibatches > 1
        for answer in answers:
            answer.own = self._is_fresh(answer) and not several
        if not answers or not (several or self._reference):
            return
        for minibatch in self._minibatches(answers, 0):
            for batch in self._micro_batches(minibatch):
                _check_stop(stop)
                rows = [minibatch[index] for index in batch.indices]
                if several:
                    for answer, logprobs in zip(rows, self._score(self.policy, batch, rows), strict=True):
                        answer.old = logprobs if self._is_fresh(answer) else None
                if self._reference is not None:
                    for answer, logprobs in zip(rows, self._score(self._reference, batch, rows), strict=True):
                        answer.reference = logprobs

    def _is_fresh(self, answer: Answer) -> bool:
        """Its old policy is this version, not the one that wrote it."""
        return answer.staleness == 0 or self.config.tis_cap > 0

    def _score(self, model: Decoder, batch: MicroBatch, rows: Sequence[Answer]) -> Sequence[Tensor]:
        """Log-probabilities of each answer's tokens, on the CPU."""
        logprobs_A = score_answers(model, batch, self.scoring).logprobs_A.cpu()
        return logprobs_A.split([row.example.answer for row in rows])

    def _micro_batches(self, minibatch: Sequence[Answer]) -> list[MicroBatch]:
        examples = [answer.example for answer in minibatch]
        parts = bucket([len(example.tokens) for example in examples], self.config.tokens_per_microbatch)
        return [collate(examples, indices, self.scoring.device) for indices in parts]

    def _update(
        self, minibatch: Sequence[Answer], measured: Measured, *, first: bool, stop: Callable[[], bool]
    ) -> None:
        """One optimizer step."""
        weights = answer_weights([answer.example.answer for answer in minibatch], self.config.loss_level)
        total = 0.0
        for batch in self._micro_batches(minibatch):
            _check_stop(stop)
            share = partial(self._share, token_data(minibatch, batch, weights), measured)
            loss, scored = backpropagate(self.policy, batch, self.scoring, share)
            total += loss
            if first:
                fresh = [minibatch[index].staleness == 0 for index in batch.indices]
                measured.add_scored(scored, [minibatch[index].rollout for index in batch.indices], fresh)
        measured.lr = self.config.lr * warm_up(self.updates, self.config.warmup_steps)
        norm = update(self.policy, self.optimizer, measured.lr, self.config.max_grad_norm, total)
        self.intact = False
        self.updates += 1
        measured.losses.append(total)
        measured.norms.append(norm)

    def _share(self, data: TokenData, measured: Measured, scored: Scored, rows: slice) -> Tensor:
        """What some rows of a micro-batch add to the update's loss."""
        found = policy_loss(scored.logprobs_A, scored.entropy_A, data[rows], self._objective)
        measured.add_update(found)
        return (found.loss_A * data.weights_A[rows]).sum()


def _check_stop(stop: Callable[[], bool]) -> None:
    if stop():
        raise StepInterrupted("stopped in the middle of a training step; it will be done again")
