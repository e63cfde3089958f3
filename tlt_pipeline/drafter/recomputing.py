"""Hidden states from tokens alone: the policy that wrote them reads them again, in one pass.

For engines that can't stream features, and where shards are to be small (5 bytes a token). Shapes: T = tokens of a
document, W = tokens of a row of documents, C = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tlt_pipeline.drafter.batching import DocumentAttention, split_documents
from tlt_pipeline.drafter.shards import Document
from tlt_pipeline.models.decoder import Decoder, Ops


def lacks_states(documents: Sequence[Document]) -> bool:
    return documents[0].hidden.shape[1] == 0


def recompute(
    policy: Decoder,
    documents: Sequence[Document],
    *,
    tokens_at_once: int,
    tokens_per_answer: int,
    taps: tuple[int, ...] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Document] | None:
    """The documents, which begin with their sequence, with features in bfloat16. Of one that was to be trained on in
    part (`tokens_per_answer`, 0: all), that part. `taps`: layers of the policy that the drafter reads. None: stopped,
    between two rows of at most `tokens_at_once` tokens or one document."""
    found: list[Document] = []
    for group in split_documents(documents, tokens_at_once):
        if should_stop():
            return None
        found += [_part(document, tokens_per_answer) for document in _read(policy, group, taps)]
    return found


@torch.no_grad()
def _read(policy: Decoder, documents: Sequence[Document], taps: tuple[int, ...]) -> list[Document]:
    device, lengths = policy.embed.weight.device, [len(document) for document in documents]
    tokens_W = torch.cat([document.token_ids for document in documents]).to(device, torch.int64)
    positions_W = torch.cat([torch.arange(length) for length in lengths]).to(device)
    hidden_1WC = policy.hidden(tokens_W[None], positions_W[None], Ops(DocumentAttention(lengths)), taps)
    parts = hidden_1WC[0].to(torch.bfloat16).cpu().split(lengths)
    return [replace(document, hidden=hidden_TC) for document, hidden_TC in zip(documents, parts, strict=True)]


def _part(document: Document, tokens_per_answer: int) -> Document:
    if not 0 < tokens_per_answer <= int(document.loss_mask.sum()):
        return document
    begin = max(int(document.loss_mask.argmax()) - 1, 0)
    return Document(
        document.token_ids[begin:],
        document.hidden[begin:].clone(),  # a view would keep the whole document's
        document.loss_mask[begin:],
        document.position + begin,
        document.group,
    )
