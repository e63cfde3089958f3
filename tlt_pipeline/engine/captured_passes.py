"""The engine's passes as CUDA graphs: decoding, verifying and drafting without a launch for each kernel.

A pass can be captured because all it depends on is in tensors (`tiled_attention.Sight`): tokens, positions, and what
each token sees. `CapturedPasses` holds what has to stay where it was at the capture, beside the caches and the policy:
the passes' inputs and outputs, and a copy of the drafter's weights, into which each new version is written. A new cache
(each lease) or a new policy is captured anew.

Buffers, padding and the choice of graphs are tested with a recorder that runs the work again. None of this has run on a
GPU yet; `pytest -m gpu` captures and replays where there is one.
Shapes: B = rows, W = tokens a row, N = B * W, P = named slots, C = hidden size, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tlt_pipeline.engine.batch import Batch
from tlt_pipeline.engine.forward import Forward
from tlt_pipeline.engine.graphs import (
    CapturedGraphs,
    GraphLimits,
    Pass,
    Recorder,
    Stage,
    Tensors,
    estimate_costs,
    plan_graphs,
)
from tlt_pipeline.engine.speculation import Drafting
from tlt_pipeline.engine.strategies import Strategy
from tlt_pipeline.engine.tiled_attention import Sight, TiledAttention, see_everything_before
from tlt_pipeline.models.decoder import DecoderConfig
from tlt_pipeline.models.drafter import Drafter, EagleDrafter
from tlt_pipeline.models.drafter_files import shape_of
from tlt_pipeline.models.eagle3 import Eagle3Drafter

MOST_ROWS = 1024
"""Tokens that a captured pass verifies: beyond, launches cost little beside the work."""
BUDGET = 4 << 30
"""Bytes of all graphs."""


class CapturedPasses:
    """`capture` first; a pass of a shape that wasn't captured runs as it is (`graphs.eager` counts them)."""

    def __init__(
        self,
        forward: Forward,
        batch: Batch,
        strategies: tuple[Strategy, ...],
        max_speculating: int,
        window: int,
        drafter: Drafter | None = None,
    ) -> None:
        """`max_speculating`: running answers up to which a strategy other than `off` may be chosen; `window`: positions
        that the drafter looks back at; `drafter`: one like those that will be loaded; None: as made here."""
        policy = forward.policy
        self.forward, self.batch = forward, batch
        with torch.inference_mode(False):  # weights that change are counted, which inference tensors aren't
            # what is before the layer and behind it isn't captured: of the head one row will do
            empty = _empty_like(drafter, policy.config, forward.taps)
            self.own = Drafting.of(policy, empty.to(policy.embed.weight), window)
        self.places = max(each.depth for each in strategies) + 1
        limits = GraphLimits(len(batch.seeds), max_speculating, MOST_ROWS, BUDGET)
        costs = estimate_costs(policy.config, policy.embed.weight.element_size(), context=0)  # there is no mask
        passes: dict[Stage, Pass] = {
            "verify": Pass(self._verify, self._verify_example),
            "draft": Pass(self._draft, self._draft_example),
        }
        self.graphs = CapturedGraphs(plan_graphs(strategies, limits, costs), passes)

    def capture(self, record: Recorder | None = None) -> None:
        """What was planned, as CUDA graphs, or with another recorder. Answers may be running: what is read and written
        in the caches meanwhile lies behind the longest answer."""
        self.graphs.capture(record)

    def fit(self, drafter: Drafter) -> bool:
        """Whether they compute this drafter: one from elsewhere may have other dimensions."""
        return shape_of(drafter) == replace(shape_of(self.own.drafter), draft_vocab=shape_of(drafter).draft_vocab)

    @torch.no_grad()
    def load_drafter(self, drafter: Drafter) -> None:
        """What is drafted with from now on."""
        for name, parameter in self.own.drafter.named_parameters():
            if not name.startswith("own_head"):
                parameter.copy_(drafter.get_parameter(name))

    def verify(self, tokens_BW: Tensor, positions_BW: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        """-> features [N, C] and logits [N, V], both overwritten by the next pass."""
        features_BWC, logits_BWV = self.graphs.run("verify", tokens_BW, positions_BW, *self._widened(sight))
        return features_BWC.flatten(0, 1), logits_BWV.flatten(0, 1)

    def cover(self, attend: TiledAttention) -> bool:
        """Only passes over all running rows: a graph for more rows fills the rest of them with anything."""
        return attend.first_row == 0 and len(attend.sight.slots_BW) == len(self.batch)

    def draft(self, tokens_BW: Tensor, features_BWC: Tensor, positions_BW: Tensor, sight: Sight) -> Tensor:
        """-> predicted features [N, C], overwritten by the next pass."""
        inputs = tokens_BW, features_BWC, positions_BW, *self._widened(sight)
        return self.graphs.run("draft", *inputs)[0].flatten(0, 1)

    def draft_width(self, B: int, W: int) -> int:
        """How many pairs a row to read where W are to be read: as many as a graph has, if one has so many."""
        return self.graphs.wider("draft", B, W)

    def _widened(self, sight: Sight) -> Tensors:
        return sight.widened(self.places).tensors()

    def _verify(self, tokens_BW: Tensor, positions_BW: Tensor, *sight: Tensor) -> Tensors:
        B, W = tokens_BW.shape
        hidden_PC = self.forward.read(tokens_BW, positions_BW, TiledAttention(self.batch.cache, Sight(*sight)))
        logits_PV = self.forward.logits(hidden_PC)
        return hidden_PC[: B * W].view(B, W, -1), logits_PV[: B * W].view(B, W, -1)

    def _draft(self, tokens_BW: Tensor, features_BWC: Tensor, positions_BW: Tensor, *sight: Tensor) -> Tensors:
        attend = TiledAttention(self.own.cache(self.batch), Sight(*sight))
        inputs = tokens_BW.flatten(), features_BWC.flatten(0, 1), positions_BW.flatten()
        return (self.own.features(*inputs, attend).view(*tokens_BW.shape, -1),)

    def _verify_example(self, B: int, W: int) -> Tensors:
        length = self.batch.cache.length
        slots_BW = torch.arange(length - W, length, device=self.batch.device).repeat(B, 1)
        sight = self._widened(see_everything_before(slots_BW, since_BW=slots_BW))
        last = self.forward.policy.config.max_position_embeddings - 1
        return torch.zeros_like(slots_BW), slots_BW.clamp_max(last), *sight

    def _draft_example(self, B: int, W: int) -> Tensors:
        tokens_BW, *places = self._verify_example(B, W)
        size = self.forward.policy.config.hidden_size
        return tokens_BW, self.forward.policy.embed.weight.new_zeros(B, W, size), *places


def _empty_like(drafter: Drafter | None, policy: DecoderConfig, taps: tuple[int, ...]) -> Drafter:
    """With a head of one row."""
    if isinstance(drafter, Eagle3Drafter):
        return Eagle3Drafter(policy, taps, 1, drafter.config, drafter.layer.norm_before_residual)
    return Eagle3Drafter(policy, taps, 1) if taps else EagleDrafter(policy)
