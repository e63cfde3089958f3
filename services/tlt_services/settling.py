"""What becomes of a finished answer: scored in a process pool, turned into a completion, its features into shards.

All of it runs beside the decoding, one task an answer; `drained` waits for them, `failed` has the first error.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from tlt_pipeline.actor import Actor
from tlt_pipeline.blobs import open_hidden_states
from tlt_pipeline.bus.streams import Delivery
from tlt_pipeline.drafter.streaming import ShardStream
from tlt_pipeline.engine.results import FeaturePiece, Finished
from tlt_pipeline.engine.rollout_engine import Output
from tlt_pipeline.messages import COMPLETIONS, HIDDEN_STATES, Array, Claim, Completion, HiddenShard, RolloutRequest
from tlt_pipeline.models.tokenizer import Tokenizer
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.tasks.pool import VerifierPool


class Settling:
    def __init__(self, actor: Actor, tokenizer: Tokenizer, claim: Claim) -> None:
        assert actor.slot is not None
        self.actor, self.bus, self.slot, self.tokenizer = actor, actor.bus, actor.slot, tokenizer
        self.claim: Claim = claim
        self.verifiers = VerifierPool(actor.config.task)
        blobs = open_hidden_states(actor.config.hidden_states, RunDir(actor.run_dir), actor.redis_url)
        streamed = actor.config.hidden_states.model_copy(update={"held_out_share": actor.config.held_out_share})
        self.shards = ShardStream(blobs, streamed, actor.slot, actor.worker)
        self.held: dict[str, Delivery] = {}
        """Requests that this worker holds and has not settled, by request id."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.drafts, self.accepted = 0, 0
        self._collecting = asyncio.Lock()
        self._dropped: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def settle(self, output: Output) -> None:
        """Starts what is to be done with one step's output."""
        if output.pieces or output.finished:
            self._start(self._stream(output.pieces, output.finished))
        for finished in output.finished:
            self._start(self._complete(finished))
        for request, reason in output.refused:
            self._start(self.refuse(request, reason))

    async def drained(self) -> None:
        """Everything is settled, and the features that were collected are on their way."""
        await self._publish(self.shards.flush)
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self, *, crashed: bool) -> None:
        """Gives unsettled requests back to the others; after a crash as they are, their attempt counted: one of them
        may be what the engine fails on, and after limits.max_attempts it is given up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._dropped:
            self.actor.log.info("hidden states dropped", **self._dropped)
        if self.held and not crashed:
            await self.bus.release(list(self.held.values()))
        await asyncio.to_thread(self.verifiers.close)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def _complete(self, finished: Finished) -> None:
        """Scores an answer and turns its request into a completion, in one step on the bus."""
        request = finished.request
        delivery = self.held[request.request_id]
        stops = set(request.sampling.stop_token_ids)
        text = self.tokenizer.decode([token for token in finished.tokens if token not in stops])
        verdict = await self.verifiers.score(request.source, request.entry, text)
        if verdict.error:
            self.actor.metrics.count_skipped("verifier_failed")
            self.actor.log.warning("no verdict", request=request.request_id, reason=verdict.error)
        self._count(finished)
        completion = self._completion(finished, verdict.reward, verdict.error, delivery.attempt)
        if not await self.bus.complete(delivery, COMPLETIONS, completion):
            self.actor.metrics.count_skipped("settled_by_another")
        self.held.pop(request.request_id, None)

    def _count(self, finished: Finished) -> None:
        draft, metrics = finished.draft, self.actor.metrics
        self.drafts += draft.drafts
        self.accepted += draft.accepted
        metrics.requests.inc()
        metrics.prompt_tokens.inc(finished.request.prompt.length)
        metrics.generation_tokens.inc(len(finished.tokens))
        metrics.drafts.inc(draft.drafts)
        metrics.draft_tokens.inc(draft.drafted)
        metrics.accepted_tokens.inc(draft.accepted)

    async def refuse(self, request: RolloutRequest, reason: str) -> None:
        delivery = self.held.pop(request.request_id)
        self.actor.log.error("request refused", request=request.request_id, reason=reason)
        await self.bus.dead_letter(delivery, reason)

    async def _stream(self, pieces: list[FeaturePiece], finished: list[Finished]) -> None:
        def collect() -> list[HiddenShard]:
            shards = [shard for piece in pieces for shard in self.shards.add(piece)]
            return shards + [shard for each in finished for shard in self.shards.end(each.request, each.tokens)]

        await self._publish(collect)

    async def _publish(self, collect: Callable[[], list[HiddenShard]]) -> None:
        """Copies and writes beside the event loop, one after the other, in the order of the calls."""
        if not self.actor.config.trains_drafter:
            return
        async with self._collecting:
            shards = await asyncio.to_thread(collect)
            for shard in shards:
                await self.bus.append(HIDDEN_STATES, shard)
            for reason, amount in (self.shards.counts - self._dropped).items():
                self.actor.metrics.count_skipped(f"hidden_states_{reason}", amount)
            self._dropped = self.shards.counts.copy()

    def _completion(self, finished: Finished, reward: float, error: str | None, attempt: int) -> Completion:
        request = finished.request
        return Completion(
            request_id=request.request_id,
            group_id=request.group_id,
            step=request.step,
            index=request.index,
            purpose=request.purpose,
            policy_version=request.policy_version,
            seed=request.seed,
            prompt=request.prompt,
            tokens=Array.of(finished.tokens),
            logprobs=Array.of(finished.logprobs, "float32"),
            policy_logprobs=Array.of(finished.policy_logprobs, "float32"),
            finish_reason=finished.reason,
            reward=reward,
            claim=self.claim,
            reward_error=error,
            draft=finished.draft,
            slot=self.slot,
            attempt=attempt,
            started_at=finished.started_at,
            finished_at=time.time(),
        )
