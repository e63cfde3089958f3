"""One answer being written, and what it takes with it when it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tlt_pipeline.engine.ngram import NgramText
from tlt_pipeline.engine.results import Finished
from tlt_pipeline.engine.stopping import find_end
from tlt_pipeline.messages import DrafterUse, DraftStats, FinishReason, RolloutRequest
from tlt_pipeline.models.tokenizer import Tokenizer


@dataclass
class Running:
    request: RolloutRequest
    prompt: list[int]
    text: NgramText | None = None
    """For n-gram proposals; None: they are not wanted."""
    started_at: float = field(default_factory=time.time)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    decode_steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    drafters: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """By version: verify passes with its proposals, those whose first proposal was right."""
    streamed: int = 0
    """Positions whose features left already."""
    rejections: int = 0
    """Passes since then that ended at a wrong proposal."""

    @property
    def remaining(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.tokens)

    def count_draft(self, proposed: int, accepted: int, depth: int, drafter_version: int | None) -> None:
        """One verify pass with proposals. `drafter_version`: None where no trained drafter proposed."""
        if not proposed:
            return
        self.drafts += 1
        self.drafted += proposed
        self.rejections += accepted < min(proposed, depth)
        self.accepted_by_position.extend([0] * max(depth - len(self.accepted_by_position), 0))
        for position in range(accepted):
            self.accepted_by_position[position] += 1
        if drafter_version is not None:
            drafts, hits = self.drafters.get(drafter_version, (0, 0))
            self.drafters[drafter_version] = drafts + 1, hits + bool(accepted)

    def extend(
        self, tokens: list[int], logprobs: list[float], policy_logprobs: list[float], tokenizer: Tokenizer
    ) -> FinishReason | None:
        """Appends what was drawn, no further than where the answer ends; -> why it ended."""
        self.decode_steps += 1
        kept, end = find_end(self.tokens, tokens, self.request.sampling, tokenizer)
        self.tokens += tokens[:kept]
        self.logprobs += logprobs[:kept]
        self.policy_logprobs += policy_logprobs[:kept]
        if self.text is not None:
            self.text.extend(tokens[:kept])
            if end is not None:
                self.text.close()
        return end

    def finish(self, reason: FinishReason) -> Finished:
        stats = DraftStats(
            drafts=self.drafts,
            drafted=self.drafted,
            accepted=sum(self.accepted_by_position),
            accepted_by_position=tuple(self.accepted_by_position),
            decode_steps=self.decode_steps,
            drafter_versions=tuple(self.drafters),
            drafters=tuple(
                DrafterUse(version=version, drafts=drafts, hits=hits)
                for version, (drafts, hits) in self.drafters.items()
            ),
        )
        return Finished(
            self.request, self.tokens, self.logprobs, self.policy_logprobs, reason, stats, self.started_at
        )  # fmt: skip
