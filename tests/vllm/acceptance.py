"""Acceptance by position of a run's newest drafter: native engine against vLLM, the same greedy prompts.

    .venv-vllm/bin/python tests/vllm/acceptance.py RUN_DIR [--depth 4] [--prompts 32] [--tokens 96]

vLLM draws an answer's first token from the pass that reads the prompt and proposes from the second on; the native
engine proposes the first one too, and its passes are cut elsewhere from there on. So the native engine is measured
twice: as it is, and on prompts that end with their answer's first token, where both make the same passes.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import torch
import typer

from tlt_pipeline.config import RunConfig, load_config
from tlt_pipeline.engine.engine import Engine, decode_all
from tlt_pipeline.engine.results import Finished
from tlt_pipeline.messages import Array, RolloutRequest
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.weights import WeightStore
from tlt_services.acceptance import acceptance_of, chain_config, held_out_requests


def after_first_token(requests: list[RolloutRequest], done: list[Finished]) -> list[RolloutRequest]:
    """The same requests with the first token of each answer as part of the prompt; answers of one token are left
    out."""
    moved: list[RolloutRequest] = []
    for request, answer in zip(requests, done, strict=True):
        if len(answer.tokens) > 1:
            left = request.sampling.model_copy(update={"max_new_tokens": request.sampling.max_new_tokens - 1})
            prompt = Array.of([*request.prompt.tolist(), answer.tokens[0]])
            moved.append(request.model_copy(update={"prompt": prompt, "sampling": left}))
    return moved


def decode(
    policy: Decoder, drafter: Drafter, tokenizer: Tokenizer, config: RunConfig, requests: list[RolloutRequest]
) -> list[Finished]:
    """By the native engine, in the order of the requests."""
    engine = Engine(policy, 1, tokenizer, config.engine, context_window=config.drafter.context_window)
    engine.set_drafter(drafter, 1)
    with torch.inference_mode():
        return decode_all(engine, requests)


async def measure(run: Path, depth: int, prompts: int, tokens: int) -> None:
    from tlt_pipeline.engine.vllm_engine import VllmEngine

    overrides = ["engine.dtype=float32", "engine.threads=1", "engine.max_batch=8", "drafter.train.enabled=false"]
    config = load_config(run / "config.yaml", [*overrides, "engine.vllm.kv_cache_gb=0.5"])
    config = config.model_copy(update={"engine": chain_config(config.engine, depth)})
    weights = WeightStore(run / "weights", 1000)
    version, published = weights.versions("policy")[-1], weights.latest("drafter")
    assert published is not None, f"{run} has no drafter"
    tokenizer, policy = load_tokenizer(weights.folder("policy", version)), weights.load_policy(version)
    drafter = weights.load_drafter(published, policy.config)
    requests = held_out_requests(config, tokenizer, 1, prompts, tokens)
    ours = decode(policy, drafter, tokenizer, config, requests)
    moved = decode(policy, drafter, tokenizer, config, after_first_token(requests, ours))
    typer.echo(f"native                    {acceptance_of(ours, depth)}")
    typer.echo(f"native from 2nd token on  {acceptance_of(moved, depth)}")
    finished: dict[str, Finished] = {}
    came = asyncio.Event()

    def take(output) -> None:
        finished.update({done.request.request_id: done for done in output.finished})
        came.set()

    with tempfile.TemporaryDirectory() as scratch:
        store = WeightStore(Path(scratch) / "weights", 10)
        store.write_policy(1, policy, tokenizer, parent=0, step=0)
        first = store.write_drafter(1, drafter, parent=0, policy_version=1, step=0)
        engine = await VllmEngine.start(config, store, tokenizer, 1, take, Path(scratch) / "vllm")
        try:
            await engine.load_drafter(store, first)
            engine.submit(requests)
            while len(finished) < len(requests):
                came.clear()
                waits = {asyncio.ensure_future(came.wait()), engine.failure}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if engine.failure.done():
                    engine.failure.result()
        finally:
            await engine.close()
    theirs = [finished[request.request_id] for request in requests]
    same = sum(mine.tokens == other.tokens for mine, other in zip(ours, theirs, strict=True))
    typer.echo(f"vLLM                      {acceptance_of(theirs, depth)}")
    typer.echo(f"same answers              {same} of {len(requests)}")


def main(run: Path, depth: int = 4, prompts: int = 32, tokens: int = 96) -> None:
    torch.set_num_threads(1)
    asyncio.run(measure(run, depth, prompts, tokens))


if __name__ == "__main__":
    typer.run(main)
