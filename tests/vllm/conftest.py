"""vLLM starts slowly: one engine for the whole module, with the quickstart's policy (tied embeddings) and a drafter."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from tlt_pipeline.config import RunConfig, validate_config
from tlt_pipeline.engine.results import Finished
from tlt_pipeline.engine.rollout_engine import Output
from tlt_pipeline.messages import Array, RolloutRequest, Sampling, WeightsPublished
from tlt_pipeline.models.checkpoint import load_decoder
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import EagleDrafter, drafter_from_policy
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.weights import WeightStore

POLICY = Path("configs/quickstart-policy")
DEPTH, MAX_BATCH = 3, 64
STOP = 1


@dataclass
class Stage:
    """An engine at work, and what came out of it."""

    store: WeightStore
    config: RunConfig
    tokenizer: Tokenizer
    policy: Decoder
    drafter: EagleDrafter
    published: WeightsPublished
    finished: dict[str, Finished] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: Output) -> None:
        self.finished.update({done.request.request_id: done for done in output.finished})
        self.refused.update({request.request_id: reason for request, reason in output.refused})
        self.came.set()

    async def answer(self, engine, requests: list[RolloutRequest], patience: float = 120.0) -> list[Finished]:
        for request in requests:
            self.finished.pop(request.request_id, None)
        engine.submit(requests)
        async with asyncio.timeout(patience):
            while not all(request.request_id in self.finished for request in requests):
                self.came.clear()
                came = asyncio.ensure_future(self.came.wait())
                await asyncio.wait({came, engine.failure}, return_when=asyncio.FIRST_COMPLETED)
                if engine.failure.done():
                    engine.failure.result()
        return [self.finished[request.request_id] for request in requests]

    def request(self, name: str, text: str, version: int, **sampling) -> RolloutRequest:
        given = {"temperature": 0.0, "max_new_tokens": 48, "stop_token_ids": (STOP,), **sampling}
        return RolloutRequest(
            request_id=name,
            group_id=name,
            step=0,
            index=0,
            policy_version=version,
            seed=zlib.crc32(name.encode()) >> 1,
            prompt=Array.of(self.tokenizer.encode(text)),
            sampling=Sampling(**given),
            source="none",
            entry="{}",
        )


@pytest.fixture(scope="session")
def stage(tmp_path_factory) -> Stage:
    torch.set_num_threads(1)
    store = WeightStore(tmp_path_factory.mktemp("run") / "weights", 10)
    tokenizer, policy = load_tokenizer(POLICY), load_decoder(POLICY)
    with torch.no_grad():  # less sure of itself: vLLM draws at temperatures up to 2, and here that should be random
        policy.norm.weight *= 0.4
    store.write_policy(1, policy, tokenizer, parent=0, step=0)
    drafter = drafter_from_policy(policy)
    published = store.write_drafter(1, drafter, parent=0, policy_version=1, step=0)
    config = validate_config(
        {
            "policy": {"model": str(POLICY)},
            "task": {"sources": [{"name": "chain_sum"}]},
            "rollout": {"max_new_tokens": 64},
            "hidden_states": {"source": "recompute"},
            "engine": {
                "type": "vllm",
                "dtype": "float32",
                "threads": 1,
                "max_batch": MAX_BATCH,
                "max_context": 256,
                "speculation": {"drafter": "eagle", "choice": "fixed", "depth": DEPTH},
                "vllm": {"kv_cache_gb": 0.1, "stall_s": 120},
            },
        }
    )
    return Stage(store, config, tokenizer, policy, drafter, published)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(stage: Stage, tmp_path_factory) -> AsyncIterator:
    from tlt_pipeline.engine.vllm_engine import VllmEngine

    scratch = tmp_path_factory.mktemp("vllm")
    engine = await VllmEngine.start(stage.config, stage.store, stage.tokenizer, 1, stage.take, scratch)
    await engine.load_drafter(stage.store, stage.published)
    yield engine
    await engine.close()
