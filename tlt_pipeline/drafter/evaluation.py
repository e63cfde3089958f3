"""How well a drafter drafts, on documents that it isn't trained on.

Shapes: D = depth of the chain, N = tokens, P = places (pairs) of one document, V = vocabulary, v = draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_pipeline.drafter.batching import Batch, pack, split_documents
from tlt_pipeline.drafter.losses import FrozenParts
from tlt_pipeline.drafter.shards import Document
from tlt_pipeline.drafter.unrolling import step_weights, unroll
from tlt_pipeline.models.drafter import Drafter


@dataclass(frozen=True)
class HeldOut:
    """`loss`: verify passes a token, expected for the held-out answers; what a drafter is for is to lower it.
    `agreement`, by depth: 1 - total variation between the two distributions at the rollout's temperature, which is how
    often a proposal can be right at best, and within about 1 % how often shared-noise proposals are; at temperature 0,
    how often the best token is the same. `cross_entropy`: of the first proposal against the policy's distribution,
    nats a token. `pairs`: places looked at. `by_prompt`: expected passes and tokens [prompts, 2]."""

    loss: float
    agreement: tuple[float, ...]
    cross_entropy: float
    pairs: int
    by_prompt: NDArray[np.float64]

    @property
    def acceptance_length(self) -> float:
        """Expected tokens a verify pass, bonus token included."""
        return 1.0 / self.loss

    def gain_over(self, other: HeldOut) -> tuple[float, float]:
        """How much smaller this loss is than the other's on the same documents, as a share of it, and that share's
        standard error: prompts differ far more from each other than drafters do on one of them, so it is the
        differences in each that count (the ratio estimator of survey sampling, in clusters: the answers to one prompt
        are much alike). Of few prompts the spread itself is uncertain: it is widened as Student's t distribution is
        against the normal one, for three or fewer without bound."""
        saved, tokens = (other.by_prompt - self.by_prompt)[:, 0], self.by_prompt[:, 1]
        mean, count = saved.sum() / tokens.sum(), len(tokens)
        if count <= 3:
            return float(mean / other.loss), float("inf")
        spread = np.square(saved - mean * tokens).sum() * count / (count - 3)
        return float(mean / other.loss), float(np.sqrt(spread) / tokens.sum() / other.loss)


class _Sums:
    """Over documents. `by_depth`: agreement and its count [D, 2]."""

    def __init__(self, depth: int) -> None:
        self.by_depth_D2 = np.zeros((depth, 2))
        self.cross_entropy = 0.0
        self.by_prompt: dict[int, NDArray[np.float64]] = {}

    def result(self) -> HeldOut | None:
        if not self.by_prompt:
            return None
        by_prompt = np.stack(list(self.by_prompt.values()))
        passes, tokens = by_prompt.sum(0)
        counts_D = np.maximum(self.by_depth_D2[:, 1], 1.0)
        return HeldOut(
            loss=float(passes / tokens),
            agreement=tuple((self.by_depth_D2[:, 0] / counts_D).tolist()),
            cross_entropy=self.cross_entropy / float(counts_D[0]),
            pairs=int(self.by_depth_D2[0, 1]),
            by_prompt=by_prompt,
        )


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    frozen: FrozenParts,
    documents: Sequence[Document],
    *,
    depth: int,
    temperature: float,
    tokens_at_once: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> HeldOut | None:
    """Depth k's proposals come from k - 1 steps on the drafter's own features, as in drafting. None: stopped, or
    nothing to judge by."""
    sums, scoring = _Sums(depth), frozen.of_drafter(drafter)
    for group in split_documents(documents, tokens_at_once):
        if should_stop():
            return None
        batch = pack(group, drafter.config.hidden_size).to(frozen.embedding.device)
        predicted_DNC = unroll(drafter, frozen.embedding, batch, depth).flatten(1, 2)
        weights_DN = step_weights(batch, depth).flatten(1)
        targets_NC = batch.targets_RWC.flatten(0, 1)
        agree_DN, entropy_N = _compare(predicted_DNC, targets_NC, frozen, scoring, drafter.draft_ids, temperature)
        sums.by_depth_D2[:, 0] += (agree_DN * weights_DN).sum(1).cpu().numpy()
        sums.by_depth_D2[:, 1] += weights_DN.sum(1).cpu().numpy()
        sums.cross_entropy += (entropy_N * weights_DN[0]).sum().item()
        for index, found in _passes_by_document(agree_DN, batch).items():
            prompt = group[index].group
            sums.by_prompt[prompt] = sums.by_prompt.get(prompt, np.zeros(2)) + found
    return sums.result()


def _compare(
    predicted_DNC: Tensor,
    targets_NC: Tensor,
    frozen: FrozenParts,
    scoring: FrozenParts,
    draft_ids: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Features -> agreement at every depth [D, N], and the first depth's cross-entropy [N]. `scoring`: with
    the norm and head of what may be proposed, `draft_ids` (None: all); the policy's draw may be any."""
    agree_DN = torch.empty(predicted_DNC.shape[:2])
    entropy_N = torch.empty(predicted_DNC.shape[1])
    for low in range(0, targets_NC.shape[0], frozen.chunk):
        part = slice(low, low + frozen.chunk)
        policy_NV = frozen.scores(frozen.norm(targets_NC[part]))
        if temperature == 0:
            best_N, likely_Nv = policy_NV.argmax(-1), None
        else:
            best_N, likely_Nv = None, _select((policy_NV / temperature).softmax(-1), draft_ids)
        policy_Nv = _select(policy_NV, draft_ids).softmax(-1)
        for step, predicted_NC in enumerate(predicted_DNC[:, part]):
            drafter_Nv = scoring.scores(scoring.norm(predicted_NC))
            if step == 0:
                expected_N = torch.linalg.vecdot(policy_Nv, drafter_Nv)
                entropy_N[part] = drafter_Nv.logsumexp(-1) - expected_N
            if likely_Nv is None:
                proposed_N = drafter_Nv.argmax(-1) if draft_ids is None else draft_ids[drafter_Nv.argmax(-1)]
                agree_DN[step, part] = (best_N == proposed_N).float()
            else:
                shared_Nv = torch.minimum(likely_Nv, (drafter_Nv / temperature).softmax(-1))
                agree_DN[step, part] = shared_Nv.sum(-1)
    return agree_DN.to(predicted_DNC.device), entropy_N.to(predicted_DNC.device)


def _select(values_NV: Tensor, ids: Tensor | None) -> Tensor:
    return values_NV if ids is None else values_NV.index_select(-1, ids)


def _passes_by_document(agree_DN: Tensor, batch: Batch) -> dict[int, tuple[float, int]]:
    """For each document with places that count: expected verify passes from the first one of them on, and places."""
    owners_N, weight_N = batch.documents_RW.flatten().cpu().numpy(), batch.weight_RW.flatten().cpu().numpy()
    agree = agree_DN.double().cpu().numpy()
    found: dict[int, tuple[float, int]] = {}
    for document in range(int(owners_N.max()) + 1):
        inside = owners_N == document
        counting = np.flatnonzero(weight_N[inside])
        if len(counting):
            agree_DP = agree[:, inside][:, counting[0] :]
            found[document] = expected_passes(agree_DP), agree_DP.shape[1]
    return found


def expected_passes(agree_DP: NDArray[np.float64]) -> float:
    """Verify passes that a chain drafter needs for P tokens, if depth d's proposal for place p is right with
    probability agree_DP[d, p]. A pass that starts at place p commits the right proposals and one token more, so the
    next one starts behind them: solved from the end. (Averages of agreement would be too kind: passes start more often
    where drafting is hard.)"""
    depth, places = agree_DP.shape
    columns = agree_DP.T.tolist()
    left = [0.0] * (places + depth + 1)
    for place in range(places - 1, -1, -1):
        passes, alive = 1.0, 1.0
        for step in range(depth):
            if place + step >= places:
                break
            right = columns[place + step][step]
            passes += alive * (1.0 - right) * left[place + step + 1]
            alive *= right
        else:
            passes += alive * left[place + depth + 1]
        left[place] = passes
    return left[0]
