"""vLLM as rollout engine: the interface of the native one, AsyncLLM inside. Nothing else here imports vLLM.

Consumes: requests of the loaded policy version, weight sets. Publishes: each finished answer, to one callback in the
event loop. Waits for: vLLM's engine process. Unblocked by: its outputs; its death, or a silence of `stall_s`, which end
up in `failure`, so that the worker's requests become another attempt.
Answers are right in distribution (vLLM verifies by rejection sampling); greedy ones are the policy's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from tlt_pipeline.config import ConfigError, RunConfig
from tlt_pipeline.engine.accounts import StrategyAccount
from tlt_pipeline.engine.results import Finished
from tlt_pipeline.engine.rollout_engine import OnOutput, Output
from tlt_pipeline.engine.stopping import find_end
from tlt_pipeline.engine.vllm_settings import (
    engine_arguments,
    engine_environment,
    sampling_arguments,
    temperature_objection,
    write_drafter_config,
)
from tlt_pipeline.engine.vllm_steering import Steering, make_logger
from tlt_pipeline.engine.vllm_version import require_vllm
from tlt_pipeline.messages import Claim, DrafterUse, DraftStats, RolloutRequest, WeightsPublished
from tlt_pipeline.models.architecture import read_config
from tlt_pipeline.models.decoder import DecoderConfig
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.export import export_drafter
from tlt_pipeline.models.tokenizer import Tokenizer
from tlt_pipeline.weights import WeightStore

_SHUTDOWN_S = 10.0


class VllmEngine:
    def __init__(
        self,
        config: RunConfig,
        policy: DecoderConfig,
        tokenizer: Tokenizer,
        on_output: OnOutput,
        scratch: Path,
        seed: int,
    ) -> None:
        self.config, self.policy_config, self.tokenizer, self.scratch = config, policy, tokenizer, scratch
        self.claim: Claim = "distribution"
        self.policy_version, self.drafter_version = 0, 0
        self.device = choose_device(config.engine.device)
        self.dtype = choose_dtype(config.engine.dtype, self.device)
        self.steering = Steering(config.engine.speculation, self._set_depth, seed)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_output = on_output
        self._llm: Any = None
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._beside: set[asyncio.Task[None]] = set()
        self._asleep = False
        self._loaded_policy: tuple[WeightStore, int] | None = None
        self._loaded_drafter: tuple[WeightStore, WeightsPublished] | None = None
        self._loading = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        config: RunConfig,
        store: WeightStore,
        tokenizer: Tokenizer,
        version: int,
        on_output: OnOutput,
        scratch: Path,
        seed: int = 0,
    ) -> VllmEngine:
        """Starts vLLM with this policy version. `scratch`: a folder of this engine's own. Raises ConfigError: vLLM
        isn't here, or another one, or can't draw at `rollout.temperature`."""
        require_vllm()
        objection = temperature_objection(config.rollout.temperature)
        if objection is not None:
            raise ConfigError(f"rollout.temperature: {objection}")
        folder = store.folder("policy", version)
        engine = cls(config, read_config(folder), tokenizer, on_output, scratch, seed)
        try:
            await asyncio.to_thread(engine._start_vllm, folder)
            await engine.load_policy(store, version)
        except BaseException:
            await engine.close()
            raise
        engine._run_beside(engine._watch())
        return engine

    def _start_vllm(self, policy: Path) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = self.config.engine
        shutil.rmtree(self.scratch, ignore_errors=True)
        drafter = write_drafter_config(self.policy_config, self.dtype, self.scratch / "drafter")
        arguments = engine_arguments(engine, policy, drafter, stop_strings=bool(self.config.rollout.stop))
        with engine_environment(engine.threads or max(torch.get_num_threads(), 1)):
            self._llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments), stat_loggers=[make_logger(self.steering)]
            )

    # --- what the worker says -------------------------------------------------------------------------------------

    @property
    def tokens_committed(self) -> int:
        return self.steering.tokens

    @property
    def account(self) -> StrategyAccount:
        return self.steering.account

    @property
    def running(self) -> int:
        return len(self._answers)

    def submit(self, requests: list[RolloutRequest]) -> None:
        refused = [(request, reason) for request in requests if (reason := self._objection(request))]
        if refused:
            self._on_output(Output([], [], refused, self.running))
        unfit = {request.request_id for request, _ in refused}
        for request in requests:
            if request.request_id not in unfit:
                self._answers[request.request_id] = asyncio.create_task(self._answer(request))
        if requests and self._answers:
            self.steering.context = max(request.prompt.length for request in requests)
            self.steering.steer(min(len(self._answers), self.config.engine.max_batch))

    def _objection(self, request: RolloutRequest) -> str | None:
        """Why a request can't be served."""
        total, limit = request.prompt.length + request.sampling.max_new_tokens, self.config.engine.max_context
        tokens, vocab = request.prompt.numpy(), self.policy_config.vocab_size
        if request.policy_version != self.policy_version:
            return f"request for policy version {request.policy_version}, loaded is {self.policy_version}"
        if not len(tokens) or tokens.dtype.kind != "i" or tokens.min() < 0 or tokens.max() >= vocab:
            return f"the prompt of {request.request_id} has no tokens, or some that are no ids below {vocab}"
        if total > limit:
            return f"prompt and answer of up to {total} tokens exceed the context of {limit}: raise engine.max_context"
        return temperature_objection(request.sampling.temperature)

    def abort(self, request_ids: list[str]) -> None:
        """Drops answers that are being written; nothing is said of them any more."""
        for request_id in request_ids:
            task = self._answers.pop(request_id, None)
            if task is not None:
                task.cancel()  # vLLM aborts a request whose stream is closed

    async def load_policy(self, store: WeightStore, version: int) -> None:
        assert not self._answers, "a policy changes between requests only"
        async with self._loading:
            await self._wake()
            await self._give_policy(store, version)
            await self._llm.reset_prefix_cache()
            self._loaded_policy, self.policy_version = (store, version), version

    async def load_drafter(self, store: WeightStore, published: WeightsPublished) -> None:
        async with self._loading:
            await self._wake()
            await self._give_drafter(store, published)
            if not self._answers:  # else vLLM keeps it: cached prompts have the drafter's keys and values too
                await self._llm.reset_prefix_cache()
            self._loaded_drafter, self.drafter_version = (store, published), published.version
            self.steering.new_drafter()

    async def _give_policy(self, store: WeightStore, version: int) -> None:
        with store.opened("policy", version) as folder:
            tied = read_config(folder).tie_word_embeddings
            await self._llm.collective_rpc("tlt_load_policy", args=(str(folder.resolve()), tied))

    async def _give_drafter(self, store: WeightStore, published: WeightsPublished) -> None:
        drafter = await asyncio.to_thread(store.load_drafter, published, self.policy_config, dtype=self.dtype)
        folder = self.scratch / f"v{published.version:06d}"
        # its norm is the policy's, and taken from there
        norm_C = torch.ones(self.policy_config.hidden_size, dtype=self.dtype)
        await asyncio.to_thread(export_drafter, drafter, self.policy_config, norm_C, folder)
        await self._llm.collective_rpc("tlt_load_drafter", args=(str(folder.resolve()),))
        shutil.rmtree(folder)

    async def free(self) -> None:
        """Sleep, as `engine.vllm.sleep_level` says: the slot's memory is the drafter trainer's now."""
        assert not self._answers, "the engine is in use"
        self.steering.idle()
        async with self._loading:
            if self._asleep or not self.config.engine.vllm.sleep_level:
                return
            await self._llm.reset_prefix_cache()
            if self.device.type == "cpu":  # vLLM's own sleep does nothing there
                await self._llm.collective_rpc("tlt_release_cache")
                return
            await self._llm.sleep(self.config.engine.vllm.sleep_level)
            self._asleep = True

    async def close(self) -> None:
        self.abort(list(self._answers))
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_S)
        shutil.rmtree(self.scratch, ignore_errors=True)

    # --- one answer -------------------------------------------------------------------------------------------------

    async def _answer(self, request: RolloutRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        started, drafters = time.time(), [self.drafter_version]
        try:
            params = SamplingParams(
                **sampling_arguments(request.sampling, request.seed), output_kind=RequestOutputKind.FINAL_ONLY
            )
            await self._awake()
            last: Any = None
            stream = self._llm.generate(
                {"prompt_token_ids": request.prompt.tolist()}, params, request.request_id, priority=request.step
            )
            async for part in stream:
                last = part
            drafters = sorted({*drafters, self.drafter_version} - {0})
            output = self._finish(request, last.outputs[0], started, drafters)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 whatever ended the engine is raised where `failure` is awaited
            self._fail(error)
            return
        if self._answers.pop(request.request_id, None) is not None:
            if not self._answers:
                self.steering.idle()
            self._on_output(output)

    def _finish(self, request: RolloutRequest, done: Any, started: float, drafters: list[int]) -> Output:
        if done.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended {request.request_id} with {done.finish_reason}")
        drawn = list(done.token_ids)
        kept, reason = find_end([], drawn, request.sampling, self.tokenizer)
        assert reason is not None, "vLLM ended an answer that has no end"
        tokens = drawn[:kept]
        logprobs = [entry[token].logprob for token, entry in zip(tokens, done.logprobs, strict=False)]
        stats = draft_stats(done.spec_decode_metrics, len(drawn), drafters)
        finished = Finished(request, tokens, logprobs, logprobs, reason, stats, started)
        return Output([finished], [], [], self.running - 1)

    # --- the engine process -------------------------------------------------------------------------------------------

    def _set_depth(self, smallest: int, largest: int, depth: int) -> None:
        if self.config.engine.speculation.drafter != "off" and self._llm is not None:
            call = self._llm.engine_core.call_utility_async("tlt_set_depth", smallest, largest, depth)
            self._run_beside(call)

    async def _awake(self) -> None:
        async with self._loading:
            await self._wake()

    async def _wake(self) -> None:
        """Under `_loading`. Level 2 discarded the weights: they are given again, each with its check."""
        if not self._asleep:
            return
        await self._llm.wake_up()
        self._asleep = False
        if self._loaded_policy is not None and self.config.engine.vllm.sleep_level == 2:
            await self._give_policy(*self._loaded_policy)
        if (
            self._loaded_drafter is not None
        ):  # in peers a drafter got lost in sleep, and nothing told of it but the time
            await self._give_drafter(*self._loaded_drafter)

    async def _watch(self) -> None:
        """A silence of `stall_s` while answers are being written is a failure."""
        limit, tokens, moment = self.config.engine.vllm.stall_s, -1, time.monotonic()
        while True:
            await asyncio.sleep(min(limit / 4, 5.0))
            if not self._answers or self.steering.tokens != tokens:
                tokens, moment = self.steering.tokens, time.monotonic()
            elif time.monotonic() - moment > limit:
                raise RuntimeError(f"vLLM has {self.running} answers to write and made no step for {limit:.0f} s")

    def _run_beside(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failure.done():
            with contextlib.suppress(asyncio.InvalidStateError):
                self.failure.set_exception(error)


def draft_stats(metrics: Any, tokens: int, drafters: list[int]) -> DraftStats:
    """From vLLM's own count of an answer: how many of its verify passes accepted 0, 1, 2 … proposals."""
    histogram: list[int] = list(metrics.histogram) if metrics is not None else []
    drafts, accepted = sum(histogram), sum(index * count for index, count in enumerate(histogram))
    by_position = tuple(sum(histogram[position:]) for position in range(1, len(histogram)))
    # with several versions in one answer vLLM doesn't say which proposed what
    uses = tuple(DrafterUse(version=version, drafts=drafts, hits=by_position[0]) for version in drafters if drafts)
    return DraftStats(
        drafts=drafts,
        drafted=metrics.num_draft_tokens if metrics is not None else 0,
        accepted=accepted,
        accepted_by_position=by_position if drafts else (),
        decode_steps=drafts + max(tokens - drafts - accepted, 0),
        drafter_versions=tuple(drafters) if drafts else (),
        drafters=uses if len(uses) == 1 else (),
    )
