"""What a verify pass leaves behind: the draws along each row's accepted path, in the places where decoding one token at
a time would have put them.

Shapes: B = running rows, W = nodes a row, E = depth + 1, N = B * W, C = numbers of a token's features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tlt_pipeline.engine.batch import Batch
from tlt_pipeline.engine.proposals import Accepted
from tlt_pipeline.engine.sampling import Draw
from tlt_pipeline.engine.verification import Verified


@dataclass(frozen=True)
class Drawn:
    """By row and place along the path [B, E]; the first 1 + accepted places of a row count."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    policy_logprobs: list[list[float]]

    def row(self, row: int, count: int) -> tuple[list[int], list[float], list[float]]:
        """The first `count` draws: tokens, logprobs, policy logprobs."""
        return self.tokens[row][:count], self.logprobs[row][:count], self.policy_logprobs[row][:count]


def store(batch: Batch, verified: Verified, drawn: Draw, accepted: Accepted) -> Drawn:
    """Writes tokens, features and (of trees) keys and values of the accepted path after what is committed."""
    B, E = accepted.path_BD.shape
    W = drawn.tokens_N.shape[0] // B
    path_N = (accepted.path_BD + np.arange(B)[:, None] * W).reshape(-1)
    nodes_N = torch.from_numpy(path_N).to(batch.device)
    places_BE = torch.from_numpy(batch.lengths[:B, None] + np.arange(E)).to(batch.device)
    tokens_BE, features_NC = drawn.tokens_N.view(B, W), verified.features_NC
    if verified.attention is not None:
        tokens_BE = drawn.tokens_N.index_select(0, nodes_N).view(B, E)
        features_NC = features_NC.index_select(0, nodes_N)
        verified.attention.compact(accepted)
    batch.tokens_RL[:B].scatter_(1, places_BE + 1, tokens_BE)
    batch.features.write(0, places_BE, features_NC)
    columns = (drawn.logprobs_N.cpu().numpy()[path_N], drawn.policy_logprobs_N.cpu().numpy()[path_N])
    return Drawn(tokens_BE.tolist(), *(column.reshape(B, E).tolist() for column in columns))
