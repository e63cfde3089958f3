"""Draft trees (EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2), on the policy's own noise.

A level's best `top_k` nodes by cumulative score are expanded `top_k` ways each; of all nodes the best `verify` are
kept. A node's score is the log-softmax of logits / T + noise: with the noise that the policy will draw with, it says
how likely this very draw is (at T = 0 there is no noise, and it is EAGLE-2's confidence).
Shapes: B = rows, K = top-k, F = nodes of a level that are expanded, N = nodes kept, V = vocabulary, v = draft
vocabulary, L = cache length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_pipeline.engine.batch import Batch
from tlt_pipeline.engine.cache import attend_masked, causal_mask
from tlt_pipeline.engine.layout import round_up
from tlt_pipeline.engine.proposals import Proposals, Tree
from tlt_pipeline.engine.speculation import Drafting, catch_up
from tlt_pipeline.engine.step_noise import StepNoise
from tlt_pipeline.engine.strategies import Strategy
from tlt_pipeline.engine.tiled_attention import TiledAttention, see_path
from tlt_pipeline.models.decoder import Attend

LEVEL_COST = 1e-4
"""Taken off a score a level: a child never ranks before its parent, also where it is certain."""


def propose_tree(drafting: Drafting, batch: Batch, noise: StepNoise, strategy: Strategy) -> Proposals:
    """noise: the policy's, at the `depth` positions to draw (all nodes of a level share one)."""
    feature_BC = catch_up(drafting, batch)
    growth = _Growth(drafting, batch, noise, min(strategy.top_k, drafting.head_vC.shape[0]))
    frontier = growth.first(feature_BC)
    for level in range(1, strategy.depth):
        frontier = growth.expand(frontier, level, strategy.depth - 1)
    return growth.best(strategy)


@dataclass(frozen=True)
class _Frontier:
    """Nodes to expand next. numbers_BF: their places among all nodes made so far; features_BFC: what their parents
    predicted; scores_BF: cumulative; above_BFA: cache slots (within the row) of their drafted ancestors."""

    numbers_BF: Tensor
    tokens_BF: Tensor
    features_BFC: Tensor
    scores_BF: Tensor
    above_BFA: Tensor


class _Growth:
    def __init__(self, drafting: Drafting, batch: Batch, noise: StepNoise, top_k: int) -> None:
        self.drafting, self.batch, self.noise, self.top_k = drafting, batch, noise, top_k
        self.B = len(batch)
        self.lengths_B = torch.from_numpy(batch.lengths[: self.B]).to(batch.device)
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.parents: list[Tensor] = []
        """Of every node made: the place of its parent among them, -1 for the root."""
        self.made = 0

    def first(self, feature_BC: Tensor) -> _Frontier:
        tokens_BK, scores_BK = self._children(feature_BC.unsqueeze(1), 0)
        tokens_BK, scores_BK = tokens_BK.squeeze(1), scores_BK.squeeze(1) - LEVEL_COST
        numbers_BK = self._note(tokens_BK, scores_BK, torch.full_like(tokens_BK, -1))
        features_BKC = feature_BC.unsqueeze(1).expand(-1, self.top_k, -1)
        return _Frontier(
            numbers_BK, tokens_BK, features_BKC, scores_BK, self.lengths_B.new_empty((self.B, self.top_k, 0))
        )

    def expand(self, frontier: _Frontier, level: int, deepest: int) -> _Frontier:
        """Reads the frontier's nodes (they stand `level` positions after the last committed token)."""
        K, (B, F) = self.top_k, frontier.tokens_BF.shape
        positions_BF = (self.lengths_B + level - 1).unsqueeze(1).expand(B, F)
        slots_BF = self.lengths_B.unsqueeze(1) + (level - 1) * K + torch.arange(F, device=self.lengths_B.device)
        above_BFA = torch.cat([frontier.above_BFA, slots_BF.unsqueeze(-1)], -1)
        features_NC = self.drafting.features(
            frontier.tokens_BF.flatten(),
            frontier.features_BFC.flatten(0, 1),
            positions_BF.flatten(),
            self._attention(slots_BF, above_BFA, deepest),
        )
        features_BFC = features_NC.view(B, F, -1)
        tokens_BFK, scores_BFK = self._children(features_BFC, level)
        scores_BN = (frontier.scores_BF.unsqueeze(-1) + scores_BFK - LEVEL_COST).flatten(1)
        parents_BN = frontier.numbers_BF.repeat_interleave(K, 1)
        numbers_BN = self._note(tokens_BFK.flatten(1), scores_BN, parents_BN)
        # the next level starts from this one's best
        best_BK = scores_BN.topk(K, 1).indices
        parent_BK = best_BK // K
        return _Frontier(
            numbers_BN.gather(1, best_BK),
            tokens_BFK.flatten(1).gather(1, best_BK),
            _pick(features_BFC, parent_BK),
            scores_BN.gather(1, best_BK),
            _pick(above_BFA, parent_BK),
        )

    def best(self, strategy: Strategy) -> Proposals:
        """The N nodes with the best scores, in the order in which they were made: parents first."""
        scores_BM, parents_BM = torch.cat(self.scores, 1), torch.cat(self.parents, 1)
        count = min(strategy.verify, scores_BM.shape[1])
        kept_BN = scores_BM.topk(count, 1).indices.sort(1).values
        places_BM = torch.zeros_like(parents_BM)
        numbers_BN = torch.arange(1, count + 1, device=kept_BN.device).expand_as(kept_BN)
        places_BM.scatter_(1, kept_BN, numbers_BN)
        parents_BN = parents_BM.gather(1, kept_BN)
        nodes_BN = torch.where(parents_BN < 0, 0, places_BM.gather(1, parents_BN.clamp_min(0)))
        tree = Tree.of(nodes_BN.cpu().numpy())
        tokens_BN = torch.cat(self.tokens, 1).gather(1, kept_BN)
        return Proposals(tokens_BN, strategy.depth, (tree.depths_BW > 0).sum(1), tree)

    def _note(self, tokens_BN: Tensor, scores_BN: Tensor, parents_BN: Tensor) -> Tensor:
        self.tokens.append(tokens_BN)
        self.scores.append(scores_BN)
        self.parents.append(parents_BN)
        first, self.made = self.made, self.made + tokens_BN.shape[1]
        return torch.arange(first, self.made, device=tokens_BN.device).expand_as(tokens_BN)

    def _children(self, features_BFC: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """The K most likely next tokens of each node and their log-softmax scores, [B, F, K] each; siblings differ."""
        B, F = features_BFC.shape[:2]
        noise, sampling = self.noise.at(level, F), self.drafting.sampling(self.batch, F)
        tokens_NK, scores_NK = self.drafting.children(features_BFC.flatten(0, 1), noise, sampling, self.top_k)
        return tokens_NK.view(B, F, -1), scores_NK.view(B, F, -1)

    def _attention(self, slots_BF: Tensor, above_BFA: Tensor, deepest: int) -> Attend:
        """Every node looks at what is committed, at its drafted ancestors and at itself."""
        cache, (B, F) = self.drafting.cache(self.batch), slots_BF.shape
        committed_B1 = self.batch.lengths[:B, None] - 1
        since_B1 = self.drafting.since(self.batch, slice(B), committed_B1)
        if cache.tiled:
            return TiledAttention(cache, see_path(slots_BF, self.lengths_B, above_BFA, since_B1))
        longest = int(self.batch.lengths[:B].max()) + deepest * self.top_k
        window = cache.window(0, B, min(round_up(longest), cache.length))
        mask_B1L = causal_mask((self.lengths_B - 1).unsqueeze(1), window[0][0], since_B1)
        mask_BFL = mask_B1L.expand(B, F, -1).scatter(2, above_BFA, 0.0)
        return attend_masked(cache, slots_BF, mask_BFL, window)


def _pick(values_BFX: Tensor, index_BK: Tensor) -> Tensor:
    """values [B, F, X] at index [B, K] of its second dimension."""
    return values_BFX.gather(1, index_BK.unsqueeze(-1).expand(-1, -1, values_BFX.shape[-1]))
