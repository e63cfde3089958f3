"""What the engine does with requests: drafts accepted, ends, logprobs, features, refusals."""

from __future__ import annotations

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F

from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.messages import Array


def test_a_good_drafter_saves_steps_and_a_bad_one_costs_no_token():
    model = cases.policy()
    requests = [cases.request(number, temperature=0.3) for number in range(6)]
    steps = {}
    for name, drafter in {"good": cases.drafter(model), "bad": cases.drafter(model, seed=3)}.items():
        engine = cases.engine(model, batch=6)
        engine.set_drafter(drafter, 1)
        finished = decode_all(engine, requests)
        steps[name] = sum(done.draft.decode_steps for done in finished)
        for done in finished:
            assert done.draft.accepted == sum(done.draft.accepted_by_position)
            assert done.draft.accepted + done.draft.decode_steps >= len(done.tokens)
    assert steps["good"] < 0.9 * steps["bad"]


def test_logprobs_are_those_of_a_teacher_forced_pass():
    model = cases.policy()
    request = cases.request(2, temperature=0.7, top_k=12)
    done = decode_all(cases.engine(model), [request])[0]
    sequence = request.prompt.tolist() + done.tokens
    logits = model(torch.tensor([sequence]))[0, request.prompt.length - 1 : -1] / 0.7
    picked = torch.tensor(done.tokens).unsqueeze(1)
    expected = F.log_softmax(logits, -1).gather(1, picked).squeeze(1)
    assert torch.tensor(done.policy_logprobs) == pytest.approx(expected.detach().numpy(), abs=1e-5)
    kept = logits.masked_fill(logits < logits.topk(12, -1).values[:, -1:], float("-inf"))
    filtered = F.log_softmax(kept, -1).gather(1, picked).squeeze(1)
    assert torch.tensor(done.logprobs) == pytest.approx(filtered.detach().numpy(), abs=1e-5)


def test_temperature_zero_is_greedy():
    model = cases.policy()
    request = cases.request(2, temperature=0, max_new_tokens=20)
    engine = cases.engine(model)
    engine.set_drafter(cases.drafter(model), 1)
    sequence = request.prompt.tolist()
    for _ in range(20):
        sequence.append(int(model(torch.tensor([sequence]))[0, -1].argmax()))
    assert decode_all(engine, [request])[0].tokens == sequence[request.prompt.length :]


def test_answers_end_at_stop_tokens_and_at_stop_strings_whatever_is_committed_at_once():
    model = cases.policy()
    free = decode_all(cases.engine(model), [cases.request(3, max_new_tokens=60)])[0]
    stop_token = free.tokens[25]
    text = cases.tokenizer().decode(free.tokens)
    stop_text = text[10:13]
    for depth, drafter in ((4, cases.drafter(model)), (1, None)):
        engine = cases.engine(model, depth=depth)
        engine.set_drafter(drafter, 1)
        by_token, by_text = decode_all(
            engine,
            [
                cases.request(3, max_new_tokens=60, stop_token_ids=(stop_token,)),
                cases.request(3, max_new_tokens=60, stop=(stop_text,)).model_copy(update={"request_id": "text"}),
            ],
        )
        assert by_token.tokens == free.tokens[: free.tokens.index(stop_token) + 1]
        assert by_token.reason == "stop"
        assert cases.tokenizer().decode(by_text.tokens) == text[: text.index(stop_text) + 3]
    assert free.reason == "length"
    assert len(free.tokens) == 60


def test_features_leave_in_pieces_that_cover_the_answer_once():
    model = cases.policy()
    engine = cases.engine(model, batch=3)
    requests = [cases.request(number) for number in range(5)]
    finished = {done.request.request_id: done for done in decode_all(engine, requests)}
    pieces = engine.take_pieces()
    for request in requests:
        sequence = request.prompt.tolist() + finished[request.request_id].tokens
        own = [piece for piece in pieces if piece.request is request]
        assert [token for piece in own for token in piece.tokens_T.tolist()] == sequence[:-1]
        assert own[0].answer_from == request.prompt.length
        features = torch.cat([piece.features_TC for piece in own])
        logits = model.logits(features)
        expected = model(torch.tensor([sequence]))[0, :-1]
        assert torch.allclose(logits, expected, atol=1e-4)


def test_requests_that_cannot_be_served_are_refused_with_the_remedy():
    engine = cases.engine(cases.policy())
    with pytest.raises(ValueError, match=r"raise engine\.max_context"):
        engine.submit(cases.request(0, max_new_tokens=500))
    with pytest.raises(ValueError, match="policy version 3"):
        engine.submit(cases.request(0).model_copy(update={"policy_version": 3}))
    for prompt in (Array.of([1, 2, 10_000]), Array.of([1, -2]), Array.of([1.0, 2.0], "float32")):
        with pytest.raises(ValueError, match="no ids below"):
            engine.submit(cases.request(0).model_copy(update={"prompt": prompt}))


def test_freed_cache_comes_back_and_a_new_policy_is_used():
    first, second = cases.policy(seed=0), cases.policy(seed=1)
    engine = cases.engine(first)
    before = decode_all(engine, [cases.request(1)])[0].tokens
    engine.free()
    assert decode_all(engine, [cases.request(1)])[0].tokens == before
    engine.set_policy(second, 1)
    request = cases.request(1).model_copy(update={"policy_version": 1})
    after = decode_all(engine, [request])[0].tokens
    assert after != before
    assert after == decode_all(cases.engine(second), [cases.request(1)])[0].tokens
