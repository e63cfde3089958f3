"""What the drafter is trained on: the policy's next-token distribution and its next feature.

EAGLE's objective (arXiv 2401.15077, section 3.2): cross-entropy of the drafter's distribution against the policy's
soft one, plus smooth-L1 between predicted and true feature. The policy's norm and head turn either feature into
scores and stay frozen, so the only gradient wanted is that of the predicted feature: it is computed along with the
loss, chunk by chunk, and an array [tokens, vocabulary] never exists. A drafter that may propose some tokens only is
compared with the policy's distribution over these.

EAGLE-3's (arXiv 2503.01840, section 3.1) has the cross-entropy alone, of every unrolled step, by a norm and head of
the drafter's own, which get their gradients too. Shapes: S = steps, N = tokens, C = hidden size, V = vocabulary, v =
draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_pipeline.config import DrafterTrainConfig
from tlt_pipeline.models.decoder import Decoder, RMSNorm
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.models.dtypes import choose_dtype

CHUNK_ELEMENTS = 1 << 22
"""Scores held at once: 16 MB of float32 an array."""
STEP_DECAY = 0.8
"""Weight of an unrolled step against the one before, as EAGLE-3 trains: deep proposals count only after the others."""
LARGE_HEAD = 1 << 22
"""From so many weights on, the head's products are done in bfloat16 where the device is fast at it."""


@dataclass(frozen=True)
class FrozenParts:
    """What the drafter shares with the policy, and neither trains nor publishes."""

    embedding: Tensor
    """[V, C]"""
    norm: RMSNorm
    head: Tensor
    """[V, C]"""
    policy_version: int

    @classmethod
    def of(cls, policy: Decoder, version: int, device: str | torch.device = "cpu") -> FrozenParts:
        """Copies, so that the rest of the policy can be freed; float32, but for a large head (LARGE_HEAD)."""
        device = torch.device(device)
        with torch.no_grad():
            embedding = policy.embed.weight.detach().to(device, torch.float32, copy=True)
            norm = RMSNorm(policy.config.hidden_size, policy.config.rms_norm_eps).to(device)
            norm.weight.copy_(policy.norm.weight)
            tied = policy.config.tie_word_embeddings
            head = embedding if tied else policy.lm_head.weight.detach().to(device, torch.float32, copy=True)
        norm.requires_grad_(False)
        if head.numel() >= LARGE_HEAD:
            head = head.to(choose_dtype("auto", device))
        return cls(embedding, norm, head, version)

    def narrowed(self, drafter: Drafter) -> FrozenParts:
        """With the head's rows of the tokens that this drafter may propose."""
        return replace(self, head=drafter.policy_rows(self.head))

    def of_drafter(self, drafter: Drafter) -> FrozenParts:
        """With the norm and head that score this drafter's predictions."""
        head = drafter.draft_head(self.head)
        return replace(self, norm=drafter.draft_norm(self.norm), head=head.to(self.head.dtype))

    @property
    def chunk(self) -> int:
        """Tokens whose scores are computed at once."""
        return max(1, CHUNK_ELEMENTS // self.head.shape[0])

    def scores(self, normed_NC: Tensor) -> Tensor:
        """Normed features -> float32 [N, V]."""
        return F.linear(normed_NC.to(self.head.dtype), self.head).float()


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over tokens of weight × cross-entropy(policy's distribution, drafter's)."""

    @staticmethod
    def forward(ctx: Any, normed_NC: Tensor, target_NC: Tensor, weight_N: Tensor, frozen: FrozenParts) -> Tensor:
        total = normed_NC.new_zeros(())
        slope_NC = torch.empty_like(normed_NC)
        for low in range(0, normed_NC.shape[0], frozen.chunk):
            part = slice(low, low + frozen.chunk)
            policy_NV = frozen.scores(target_NC[part]).softmax(-1)
            scores_NV = frozen.scores(normed_NC[part])
            normalizer_N = scores_NV.logsumexp(-1)
            expected_N = torch.linalg.vecdot(policy_NV, scores_NV)
            total += ((normalizer_N - expected_N) * weight_N[part]).sum()
            # d loss / d scores = drafter's distribution - policy's; in place, the scores aren't needed again
            slope_NV = scores_NV.sub_(normalizer_N[:, None]).exp_().sub_(policy_NV).mul_(weight_N[part, None])
            slope_NC[part] = slope_NV.to(frozen.head.dtype) @ frozen.head
        ctx.save_for_backward(slope_NC)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope_NC,) = ctx.saved_tensors
        return slope_NC * grads[0], None, None, None


def soft_cross_entropy(predicted_NC: Tensor, target_NC: Tensor, weight_N: Tensor, frozen: FrozenParts) -> Tensor:
    """Sum of weight × H(policy, drafter) in nats. Both features are those before the policy's norm; the gradient
    reaches `predicted_NC` only."""
    with torch.no_grad():
        normed_NC = frozen.norm(target_NC)
    return _SoftCrossEntropy.apply(frozen.norm(predicted_NC), normed_NC, weight_N, frozen)


class _OwnHeadCrossEntropy(torch.autograd.Function):
    """As _SoftCrossEntropy, for several predictions of one target, through a head that is trained."""

    @staticmethod
    def forward(
        ctx: Any, normed_SNC: Tensor, head_vC: Tensor, target_NC: Tensor, weight_SN: Tensor, policy: FrozenParts
    ) -> Tensor:
        total = normed_SNC.new_zeros(())
        slope_SNC, head_slope_vC = torch.empty_like(normed_SNC), torch.zeros_like(head_vC)
        normed, head = normed_SNC.to(policy.head.dtype), head_vC.to(policy.head.dtype)
        for low in range(0, target_NC.shape[0], policy.chunk):
            part = slice(low, low + policy.chunk)
            policy_Nv = policy.scores(target_NC[part]).softmax(-1)
            for step, normed_NC in enumerate(normed[:, part]):
                scores_Nv = F.linear(normed_NC, head).float()
                normalizer_N = scores_Nv.logsumexp(-1)
                expected_N = torch.linalg.vecdot(policy_Nv, scores_Nv)
                total += ((normalizer_N - expected_N) * weight_SN[step, part]).sum()
                slope_Nv = scores_Nv.sub_(normalizer_N[:, None]).exp_().sub_(policy_Nv)
                slope_Nv = slope_Nv.mul_(weight_SN[step, part, None]).to(head.dtype)
                slope_SNC[step, part] = slope_Nv @ head
                head_slope_vC += slope_Nv.T @ normed_NC
        ctx.save_for_backward(slope_SNC, head_slope_vC)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slope_SNC, head_slope_vC = ctx.saved_tensors
        return slope_SNC * grads[0], head_slope_vC * grads[0], None, None, None


def own_head_cross_entropy(
    drafter: Drafter, predicted_SNC: Tensor, target_NC: Tensor, weight_SN: Tensor, policy: FrozenParts
) -> Tensor:
    """Sum over steps and tokens of weight × H(policy, drafter) in nats, for a drafter with a norm and head of its own.
    `policy`: narrowed to what it may propose; `target_NC`: before the policy's norm."""
    with torch.no_grad():
        target_NC = policy.norm(target_NC)
    normed_SNC = drafter.draft_norm(policy.norm)(predicted_SNC)
    return _OwnHeadCrossEntropy.apply(normed_SNC, drafter.draft_head(policy.head), target_NC, weight_SN, policy)


def drafter_loss(
    drafter: Drafter,
    predicted_SNC: Tensor,
    target_NC: Tensor,
    weight_SN: Tensor,
    policy: FrozenParts,
    settings: DrafterTrainConfig,
) -> Tensor:
    """The summed objective of this kind of drafter, of predictions from `unroll`. `policy`: as above."""
    if drafter.owns_head:
        return settings.ce_weight * own_head_cross_entropy(drafter, predicted_SNC, target_NC, weight_SN, policy)
    losses: list[Tensor] = []
    for predicted_NC, weight_N in zip(predicted_SNC, weight_SN, strict=True):
        entropy = soft_cross_entropy(predicted_NC, target_NC, weight_N, policy)
        distance = feature_loss(predicted_NC, target_NC, weight_N)
        losses.append(settings.ce_weight * entropy + settings.hidden_weight * distance)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def feature_loss(predicted_NC: Tensor, target_NC: Tensor, weight_N: Tensor) -> Tensor:
    """Sum of weight × smooth-L1, averaged over a feature's C numbers, in units of the features' root mean square: so
    the same weight in the config fits policies whose features are small or large."""
    scale = target_NC.square().mean().sqrt().clamp_min(1e-6)
    each_NC = F.smooth_l1_loss(predicted_NC / scale, target_NC / scale, reduction="none")
    return (each_NC.mean(-1) * weight_N).sum()
