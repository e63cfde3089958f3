"""The rollout engine on a real vLLM. The tests share one engine and run in order: the last one kills it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter

import psutil
import pytest
import torch

from tests.vllm.acceptance import after_first_token, decode
from tlt_pipeline.engine.engine import Engine, decode_all
from tlt_pipeline.engine.strategies import OFF, Fixed, chain
from tlt_pipeline.models.drafter import EagleDrafter
from tlt_services.acceptance import acceptance_of, chain_config

DEPTH, MAX_BATCH = 3, 64  # of the stage

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]
QUESTIONS = ("4 + 3 - 2 =\n", "7 - 5 + 1 + 9 =\n", "Count 421\n", "8 + 8 - 3 + 2 - 9 =\n")


def greedy(stage, version: int, mark: str):
    return [stage.request(f"{mark}{i}", text, version) for i, text in enumerate(QUESTIONS)]


def native(stage, policy, version: int, requests):
    speculation = stage.config.engine.speculation.model_copy(update={"drafter": "off"})
    config = stage.config.engine.model_copy(update={"speculation": speculation})
    return decode_all(Engine(policy, version, stage.tokenizer, config), requests)


async def test_greedy_answers_are_the_native_engines(stage, engine):
    requests = greedy(stage, 1, "greedy")
    ours, theirs = native(stage, stage.policy, 1, requests), await stage.answer(engine, requests)
    assert [done.tokens for done in theirs] == [done.tokens for done in ours]
    assert [done.reason for done in theirs] == [done.reason for done in ours]
    for mine, other in zip(ours, theirs, strict=True):
        assert other.logprobs == pytest.approx(mine.logprobs, abs=1e-3)


@pytest.mark.parametrize("drafter", ["off", "ngram"])
async def test_without_a_trained_drafter_too(stage, tmp_path, drafter):
    from tlt_pipeline.engine.vllm_engine import VllmEngine

    speculation = stage.config.engine.speculation.model_copy(update={"drafter": drafter})
    settings = stage.config.engine.model_copy(update={"speculation": speculation, "max_batch": 4})
    config = stage.config.model_copy(update={"engine": settings})
    requests = greedy(stage, 1, drafter)
    engine = await VllmEngine.start(config, stage.store, stage.tokenizer, 1, stage.take, tmp_path / "vllm")
    try:
        theirs = await stage.answer(engine, requests)
    finally:
        await engine.close()
    assert [done.tokens for done in theirs] == [done.tokens for done in native(stage, stage.policy, 1, requests)]
    assert (sum(done.draft.drafts for done in theirs) > 0) == (drafter == "ngram")


async def test_drafts_are_accepted_as_by_the_native_engine(stage, engine):
    """The same passes, once both start after the answer's first token (acceptance.py), up to ties in float32."""
    requests = greedy(stage, 1, "count")
    theirs = await stage.answer(engine, requests)
    config = stage.config.model_copy(update={"engine": chain_config(stage.config.engine, DEPTH)})
    ours = decode(stage.policy, stage.drafter, stage.tokenizer, config, after_first_token(requests, theirs))
    mine, other = acceptance_of(ours, DEPTH), acceptance_of(theirs, DEPTH)
    assert mine.by_position[0] > 0.1
    assert other.drafts == pytest.approx(mine.drafts, rel=0.02)
    assert other.by_position == pytest.approx(mine.by_position, abs=0.02)
    for each in theirs:
        stats = each.draft
        assert stats.drafter_versions == (1,)
        assert stats.accepted == sum(stats.accepted_by_position)
        assert stats.drafted >= stats.accepted


@pytest.mark.parametrize("speculates", [True, False], ids=["speculation", "off"])
async def test_samples_have_the_policys_distribution(stage, engine, speculates):
    """Two temperatures in one batch. The first token, and the second after the most frequent first ones, against their
    probabilities: chi-square."""
    _steer(engine, chain("eagle", DEPTH) if speculates else OFF)
    text, number, temperatures = QUESTIONS[1], 1536, (2.0, 1.2)
    requests = [
        stage.request(f"{speculates}{i}", text, 1, temperature=temperatures[i % 2], max_new_tokens=4, stop_token_ids=())
        for i in range(number)
    ]
    done = []
    for start in range(0, number, MAX_BATCH):  # as a worker pulls them
        done += await stage.answer(engine, requests[start : start + MAX_BATCH])
    _steer(engine, chain("eagle", DEPTH))
    assert (sum(each.draft.drafts for each in done) > 0) == speculates
    prompt, statistic, bins = stage.tokenizer.encode(text), 0.0, 0
    for T in temperatures:
        draws = [each for each in done if each.request.sampling.temperature == T]
        one, more = _chi_square(stage.policy, prompt, T, [each.tokens for each in draws])
        statistic, bins = statistic + one, bins + more
    assert bins >= 20
    # Wilson and Hilferty's approximation: 5 standard deviations
    z = ((statistic / bins) ** (1 / 3) - (1 - 2 / (9 * bins))) / (2 / (9 * bins)) ** 0.5
    assert z < 5, f"chi-square {statistic:.0f} of {bins} degrees of freedom, {z:.1f} standard deviations"
    for each in done[:20]:
        T = each.request.sampling.temperature
        with torch.inference_mode():
            logits_TV = stage.policy(torch.tensor([[*prompt, *each.tokens]]))[0, len(prompt) - 1 : -1] / T
        wanted = logits_TV.log_softmax(-1)[torch.arange(len(each.tokens)), each.tokens]
        assert each.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)


@torch.inference_mode()
def _chi_square(policy, prompt, T, answers):
    """-> (chi-square, degrees of freedom) of the answers' first two tokens."""
    firsts, statistic, bins = Counter(tokens[0] for tokens in answers), 0.0, 0
    logits_V = policy(torch.tensor([prompt]))[0, -1]
    statistic, bins = _add_chi(statistic, bins, logits_V / T, [tokens[0] for tokens in answers], len(answers))
    for first, count in firsts.most_common(4):
        logits_V = policy(torch.tensor([[*prompt, first]]))[0, -1]
        seconds = [tokens[1] for tokens in answers if tokens[0] == first]
        statistic, bins = _add_chi(statistic, bins, logits_V / T, seconds, count)
    return statistic, bins


def _steer(engine, strategy):
    """For batches of every size."""
    engine.steering.choice = Fixed(strategy)
    engine.steering._depths.clear()
    for exponent in range(MAX_BATCH.bit_length()):
        engine.steering.steer(1 << exponent)


def _add_chi(statistic, bins, logits_V, drawn, number):
    """Adds one draw's chi-square, tokens expected fewer than 5 times together in one bin."""
    expected_V, counts = logits_V.softmax(-1) * number, Counter(drawn)
    common = [token for token in range(len(expected_V)) if expected_V[token] >= 5]
    for token in common:
        statistic += float((counts[token] - expected_V[token]) ** 2 / expected_V[token])
    rest = number - float(sum(expected_V[token] for token in common))
    if rest >= 5:
        statistic += (number - sum(counts[token] for token in common) - rest) ** 2 / rest
        return statistic, bins + len(common)
    return statistic, bins + max(len(common) - 1, 0)


async def test_a_policy_is_replaced_with_its_tied_head(stage, engine):
    generator = torch.Generator().manual_seed(1)
    other = type(stage.policy)(stage.policy.config)
    other.load_state_dict(stage.policy.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    stage.store.write_policy(2, other, stage.tokenizer, parent=1, step=1)
    await engine.load_policy(stage.store, 2)
    requests = greedy(stage, 2, "second")
    theirs, ours = await stage.answer(engine, requests), native(stage, other, 2, requests)
    assert [done.tokens for done in theirs] == [done.tokens for done in ours]
    for mine, yours in zip(ours, theirs, strict=True):
        assert yours.logprobs == pytest.approx(mine.logprobs, abs=1e-3)
    await engine.load_policy(stage.store, 1)
    again = await stage.answer(engine, greedy(stage, 1, "again"))
    assert [done.tokens for done in again] == [
        done.tokens for done in native(stage, stage.policy, 1, greedy(stage, 1, "again"))
    ]


async def test_a_drafter_is_replaced_while_answers_are_written(stage, engine):
    good = await stage.answer(engine, greedy(stage, 1, "good"))
    bad = EagleDrafter(stage.policy.config)
    with torch.no_grad():
        for parameter in bad.parameters():
            parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(3))
    worse = stage.store.write_drafter(2, bad, parent=1, policy_version=1, step=1)
    requests = greedy(stage, 1, "mid")
    answering = asyncio.ensure_future(stage.answer(engine, requests))
    await engine.load_drafter(stage.store, worse)
    mid = await answering
    poor = await stage.answer(engine, greedy(stage, 1, "poor"))
    await engine.load_drafter(stage.store, stage.published)
    back = await stage.answer(engine, greedy(stage, 1, "back"))
    rates = [sum(e.draft.accepted for e in done) / sum(e.draft.drafts for e in done) for done in (good, poor, back)]
    assert rates[1] < rates[0] / 2
    assert rates[2] == pytest.approx(rates[0], abs=0.1)
    for done in (mid, poor, back):
        assert [each.tokens for each in done] == [each.tokens for each in good]


async def test_stale_weights_are_noticed(stage, engine):
    """The check after an update compares what modules compute: here with a folder that was never loaded."""
    folder = stage.store.folder("policy", 2)
    with pytest.raises(Exception, match="goes on computing with other weights"):
        await engine._llm.collective_rpc("tlt_check_policy", args=(str(folder.resolve()), True))


async def test_requests_that_do_not_fit_are_refused(stage, engine):
    long = stage.request("long", QUESTIONS[0], 1, max_new_tokens=4000)
    engine.submit([long, stage.request("old", "1", 7), stage.request("hot", "1", 1, temperature=5.0)])
    assert "raise engine.max_context" in stage.refused["long"]
    assert "policy version 7" in stage.refused["old"]
    assert "from 0.01 to 2, not at 5" in stage.refused["hot"]
    assert not engine.running


async def test_an_idle_engine_gives_memory_back_and_goes_on(stage, engine):
    before = await stage.answer(engine, greedy(stage, 1, "before"))
    requests = [
        stage.request(f"fill{i}", QUESTIONS[i % 4], 1, temperature=1.0, max_new_tokens=200, stop_token_ids=())
        for i in range(64)
    ]
    await stage.answer(engine, requests)
    held = _memory()
    await engine.free()
    assert held - _memory() > 20e6
    after = await stage.answer(engine, greedy(stage, 1, "after"))
    assert [each.tokens for each in after] == [each.tokens for each in before]


def _memory() -> int:
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))


async def test_a_killed_engine_is_a_failure(stage, engine):
    requests = [stage.request(f"lost{i}", QUESTIONS[0], 1, max_new_tokens=200, stop_token_ids=()) for i in range(8)]
    engine.submit(requests)
    victims = [child for child in psutil.Process().children(recursive=True) if "Worker" in child.name()]
    assert victims
    os.kill(victims[0].pid, signal.SIGKILL)
    with pytest.raises(Exception):  # noqa: B017 vLLM's own error
        await asyncio.wait_for(asyncio.shield(engine.failure), 60)
