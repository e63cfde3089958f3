"""What a rollout worker needs of an engine, whichever it is: native (`loop.py`) or vLLM (`vllm_engine.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tlt_pipeline.engine.accounts import StrategyAccount
from tlt_pipeline.engine.results import FeaturePiece, Finished
from tlt_pipeline.messages import Claim, RolloutRequest, WeightsPublished
from tlt_pipeline.weights import WeightStore


@dataclass(frozen=True)
class Output:
    """What one step brought. `refused`: requests the engine can't serve, with the reason."""

    finished: list[Finished]
    pieces: list[FeaturePiece]
    refused: list[tuple[RolloutRequest, str]]
    running: int


OnOutput = Callable[[Output], None]


class RolloutEngine(Protocol):
    failure: asyncio.Future[None]
    """Has the error that ended the engine: whoever awaits it ends the worker, whose requests others take."""

    @property
    def claim(self) -> Claim: ...

    @property
    def policy_version(self) -> int: ...

    @property
    def tokens_committed(self) -> int: ...

    @property
    def account(self) -> StrategyAccount: ...

    def submit(self, requests: list[RolloutRequest]) -> None:
        """Of the loaded policy version; each is answered, or refused, in an Output."""
        ...

    async def load_policy(self, store: WeightStore, version: int) -> None:
        """Only while no request is in the engine. Raises WeightsMissing, WeightsError."""
        ...

    async def load_drafter(self, store: WeightStore, published: WeightsPublished) -> None:
        """At any time: it can't change what is right to answer."""
        ...

    async def free(self) -> None:
        """Gives memory back while nothing runs; the next request takes it again."""
        ...

    async def close(self) -> None:
        """Running answers are dropped."""
        ...
