"""The weights of a rollout worker: the policy and drafter versions it loads, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tlt_pipeline.actor import Actor
from tlt_pipeline.drafter.initial import feature_taps
from tlt_pipeline.engine.engine import Engine
from tlt_pipeline.engine.loop import EngineLoop
from tlt_pipeline.engine.rollout_engine import OnOutput, RolloutEngine
from tlt_pipeline.messages import WEIGHTS, WeightsPublished
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.tokenizer import Tokenizer
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.weights import WeightStore


async def start_engine(
    actor: Actor, store: WeightStore, tokenizer: Tokenizer, version: int, on_output: OnOutput
) -> RolloutEngine:
    """The engine that `engine.type` asks for, with this policy version."""
    if actor.config.engine.type == "vllm":
        from tlt_pipeline.engine.vllm_engine import VllmEngine  # nothing else imports vLLM
        from tlt_pipeline.engine.vllm_steering import decided_at_start

        assert actor.slot is not None
        scratch = RunDir(actor.run_dir).root / "vllm" / f"slot{actor.slot}"
        actor.log.info("vLLM starts", **decided_at_start(actor.config.engine.speculation))
        return await VllmEngine.start(
            actor.config, store, tokenizer, version, on_output, scratch, seed=actor.config.seed + actor.slot
        )
    return EngineLoop(await asyncio.to_thread(build_engine, actor, store, tokenizer, version), on_output)


def build_engine(actor: Actor, store: WeightStore, tokenizer: Tokenizer, version: int) -> Engine:
    """An engine with this policy version. Features are kept only where a drafter is trained on those."""
    config = actor.config
    device = choose_device(config.engine.device)
    policy = store.load_policy(version, dtype=choose_dtype(config.engine.dtype, device), device=device)
    streams = config.trains_drafter and config.hidden_states.source == "rollout"
    chunk = config.hidden_states.chunk_tokens if streams else None
    return Engine(
        policy,
        version,
        tokenizer,
        config.engine,
        feature_chunk=chunk,
        context_window=config.drafter.context_window,
        seed=config.seed + (actor.slot or 0),
        taps=feature_taps(config, policy.config) if config.engine.speculation.drafter == "eagle" else (),
    )


class Loading:
    def __init__(self, actor: Actor, store: WeightStore, engine: RolloutEngine, idle: Callable[[], bool]) -> None:
        """`idle`: nothing is being decoded and no lease is held, so a policy may be loaded ahead."""
        self.actor, self.store, self.engine, self._idle = actor, store, engine, idle
        self.drafter_version = 0
        """The newest one handed to the engine, which takes it between two steps: old broadcasts are heard again after a
        restart."""
        self._loading = asyncio.Lock()

    async def load_first_drafter(self) -> None:
        """A drafter that was asked for and isn't there is waited for; where n-gram proposals stand in until it comes,
        that is said: it is never silently done without."""
        engine = self.actor.config.engine
        if engine.speculation.drafter != "eagle":
            return
        stands_in = engine.type == "native" and engine.speculation.ngram_depths
        if stands_in and await self.actor.bus.latest("drafter") is None:
            self.actor.log.warning("no drafter version yet: n-gram proposals until one is published")
            return
        published = await self.actor.wait_for(
            "the first drafter version (is drafter-trainer --slot 0 running?)",
            lambda: self.actor.bus.latest("drafter"),
        )
        assert isinstance(published, WeightsPublished)
        await self.load_drafter(published)

    async def follow(self) -> None:
        """Loads every new drafter at once, and a new policy ahead of its requests while the worker is idle."""
        last = "0"
        while True:
            for entry_id, message in await self.actor.bus.listen(WEIGHTS, last, block_s=1.0):
                last = entry_id
                if not isinstance(message, WeightsPublished):
                    continue
                if message.model == "drafter" and message.version > self.drafter_version:
                    await self.load_drafter(message)
                elif message.model == "policy":
                    await self._load_ahead(message.version)

    async def _load_ahead(self, version: int) -> None:
        """A newer policy, unless a lease has come by now. Old broadcasts are heard again after a restart."""
        async with self._loading:
            if version > self.engine.policy_version and self._idle():
                await self._load(version)

    async def settled(self) -> None:
        """No load ahead is under way; none begins while the worker isn't idle."""
        async with self._loading:
            return

    async def load_policy(self, version: int) -> None:
        """The version that requests ask for; only while the engine is empty."""
        async with self._loading:
            await self._load(version)

    async def _load(self, version: int) -> None:
        if version == self.engine.policy_version:
            return
        await self.engine.load_policy(self.store, version)
        self.actor.gauges["policy_version"] = version

    async def load_drafter(self, published: WeightsPublished) -> None:
        if self.actor.config.engine.speculation.drafter != "eagle":
            return
        await self.engine.load_drafter(self.store, published)
        self.drafter_version = published.version
        self.actor.gauges["drafter_version"] = published.version
        self.actor.log.info("drafter loaded", drafter_version=published.version)
