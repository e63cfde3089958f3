"""Replay finds nothing in honest records, and names position and scores where a record was changed."""

from __future__ import annotations

import engine_cases as cases

from tests import samples
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.engine.replay import Recorded, replay
from tlt_pipeline.messages import Array


def record(engine) -> list[Recorded]:
    requests = [cases.request(number) for number in range(4)]
    finished = decode_all(engine, requests)
    return [Recorded(done.request, samples.completion(done.request, tokens=Array.of(done.tokens))) for done in finished]


def test_honest_records_come_out_the_same_with_any_drafter():
    model = cases.policy()
    recorded = record(cases.engine(model))
    again = cases.engine(model, batch=2)
    again.set_drafter(cases.drafter(model), 1)
    assert replay(again, recorded) == []


def test_a_changed_token_is_found_with_both_scores():
    model = cases.policy()
    recorded = record(cases.engine(model))
    tokens = recorded[2].completion.tokens.tolist()
    tokens[5] = (tokens[5] + 1) % model.config.vocab_size
    changed = recorded[2].completion.model_copy(update={"tokens": Array.of(tokens)})
    recorded[2] = Recorded(recorded[2].request, changed)
    (divergence,) = replay(cases.engine(model), recorded)
    assert (divergence.request_id, divergence.position) == ("r2", 5)
    assert divergence.recorded_token == tokens[5]
    assert divergence.recorded_score is not None and divergence.replayed_score is not None
    assert divergence.replayed_score > divergence.recorded_score, "the draw is the highest perturbed score"
