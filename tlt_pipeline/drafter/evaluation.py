"""How well a drafter drafts, on documents that it isn't trained on.

Shapes: N = tokens, V = vocabulary; otherwise as in batching.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from tlt_pipeline.drafter.batching import pack, split_documents
from tlt_pipeline.drafter.losses import FrozenParts
from tlt_pipeline.drafter.shards import Document
from tlt_pipeline.drafter.unrolling import step_weights, unroll
from tlt_pipeline.models.drafter import EagleDrafter


@dataclass(frozen=True)
class HeldOut:
    """`loss`: cross-entropy against the policy's distribution in nats a token, the average over depths. `agreement`,
    by depth: 1 - total variation between the two distributions at the rollout's temperature, which is how often a
    proposal can be right at best, and within about 1 % how often shared-noise proposals are (reference: cpu.md);
    at temperature 0, how often the best token is the same. `pairs` counted at depth 1."""

    loss: float
    agreement: tuple[float, ...]
    pairs: int

    @property
    def acceptance_length(self) -> float:
        """Expected tokens a verify pass of a chain of this depth, bonus token included."""
        return 1.0 + sum(accumulate(self.agreement, mul))


@torch.no_grad()
def evaluate(
    drafter: EagleDrafter,
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
    sums_D3 = torch.zeros(depth, 3, dtype=torch.float64)
    for group in split_documents(documents, tokens_at_once):
        if should_stop():
            return None
        batch = pack(group).to(frozen.embedding.device)
        predicted = unroll(drafter, frozen.embedding, batch, depth).flatten(1, 2)
        weights = step_weights(batch, depth).flatten(1)
        targets_NC = batch.targets_RWC.flatten(0, 1)
        for low in range(0, targets_NC.shape[0], frozen.chunk):
            part = slice(low, low + frozen.chunk)
            policy_NV = frozen.scores(frozen.norm(targets_NC[part]))
            for step in range(depth):
                drafter_NV = frozen.scores(frozen.norm(predicted[step, part]))
                sums_D3[step] += _compare(policy_NV, drafter_NV, weights[step, part], temperature)
    if sums_D3[0, 2] == 0:
        return None
    counts_D = sums_D3[:, 2].clamp_min(1.0)
    loss = (sums_D3[:, 0].sum() / sums_D3[:, 2].sum()).item()
    return HeldOut(loss, tuple((sums_D3[:, 1] / counts_D).tolist()), int(sums_D3[0, 2].item()))


def _compare(policy_NV: Tensor, drafter_NV: Tensor, weight_N: Tensor, temperature: float) -> Tensor:
    """Scores -> weighted sums of (cross-entropy, agreement, 1) [3]."""
    entropy_N = drafter_NV.logsumexp(-1) - torch.linalg.vecdot(policy_NV.softmax(-1), drafter_NV)
    if temperature == 0:
        agree_N = (policy_NV.argmax(-1) == drafter_NV.argmax(-1)).float()
    else:
        shared_NV = torch.minimum((policy_NV / temperature).softmax(-1), (drafter_NV / temperature).softmax(-1))
        agree_N = shared_NV.sum(-1)
    each_N3 = torch.stack([entropy_N, agree_N, torch.ones_like(agree_N)], -1)
    return (each_N3 * weight_N[:, None]).sum(0).double().cpu()
