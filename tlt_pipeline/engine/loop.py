"""The thread that owns an engine, and its mailbox.

Consumes: orders from the event loop (requests, a drafter, a policy, free). Publishes: what each step finished, to one
callback in the event loop. Waits for: an order, while nothing runs. Unblocked by: any order.
An exception in the thread ends it and reaches whoever awaits `failure`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from tlt_pipeline.engine.accounts import StrategyAccount
from tlt_pipeline.engine.engine import Engine
from tlt_pipeline.engine.rollout_engine import OnOutput, Output
from tlt_pipeline.messages import Claim, RolloutRequest, WeightsPublished
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.weights import WeightStore


class EngineLoop:
    def __init__(self, engine: Engine, on_output: OnOutput) -> None:
        """`on_output` is called in the event loop that creates this object."""
        self.engine = engine
        self._on_output = on_output
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._refused: list[tuple[RolloutRequest, str]] = []
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: list[RolloutRequest]) -> None:
        for request in requests:
            self._orders.put(lambda request=request: self._accept(request))

    def set_drafter(self, drafter: Drafter, version: int) -> None:
        self._orders.put(lambda: self.engine.set_drafter(drafter, version))

    async def set_policy(self, policy: Decoder, version: int) -> None:
        """Only while no request is in the engine; returns when it is loaded."""
        await self._ask(lambda: self.engine.set_policy(policy, version))

    @property
    def claim(self) -> Claim:
        return self.engine.claim

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    @property
    def tokens_committed(self) -> int:
        return self.engine.tokens_committed

    @property
    def account(self) -> StrategyAccount:
        return self.engine.account

    async def load_policy(self, store: WeightStore, version: int) -> None:
        """Only while no request is in the engine; returns when it is loaded."""
        weight = self.engine.policy.embed.weight
        policy = await asyncio.to_thread(store.load_policy, version, dtype=weight.dtype, device=weight.device)
        await self.set_policy(policy, version)

    async def load_drafter(self, store: WeightStore, published: WeightsPublished) -> None:
        """The engine takes it between two steps."""
        policy = self.engine.policy
        weight = policy.embed.weight
        drafter = await asyncio.to_thread(
            store.load_drafter, published, policy.config, dtype=weight.dtype, device=weight.device
        )
        self.set_drafter(drafter, published.version)

    async def free(self) -> None:
        await self._ask(self.engine.free)

    async def close(self) -> None:
        """Ends the thread after its current step; running answers are dropped."""
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)

    async def _ask(self, action: Callable[[], None]) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def act() -> None:
            action()
            self._loop.call_soon_threadsafe(_resolve, done)

        self._orders.put(act)
        await asyncio.wait({done, self.failure}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            await self.failure

    def _accept(self, request: RolloutRequest) -> None:
        try:
            self.engine.submit(request)
        except ValueError as error:
            self._refused.append((request, str(error)))

    def _run(self) -> None:
        try:
            while self._take_orders():
                finished = self.engine.step()
                pieces = self.engine.take_pieces()
                if finished or pieces or self._refused:
                    refused, self._refused = self._refused, []
                    self._tell(Output(finished, pieces, refused, self.engine.running))
        except BaseException as error:  # noqa: BLE001 whatever ended the thread is raised again where `failure` is awaited
            self._loop.call_soon_threadsafe(_fail, self.failure, error)

    def _take_orders(self) -> bool:
        """Carries out what is in the mailbox; waits for something while the engine is idle. False: the end."""
        idle = not (self.engine.running or self.engine.waiting or self._refused)
        try:
            while True:
                order = self._orders.get(block=idle)
                if order is None:
                    return False
                order()
                idle = False
        except queue.Empty:
            return True

    def _tell(self, output: Output) -> None:
        self._loop.call_soon_threadsafe(self._on_output, output)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
