"""What the strategy choice is predicted from: step times, acceptance, the budget of trials."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from strategy_world import STRATEGIES, World, remaining, state_of

from tlt_pipeline.engine.acceptance import Acceptance
from tlt_pipeline.engine.exploration import AT_START, EARNED, Exploration
from tlt_pipeline.engine.step_time import StepTime
from tlt_pipeline.engine.strategies import OFF, StepFacts, parse_strategy

INDEX = {str(each): index for index, each in enumerate(STRATEGIES)}
LINEAR = {"free_rows": 0, "noise": 0.0, "interrupted": 0.0, "catch_up": 0.0, "matches": 1.0}


def timed(world: World, steps: list[tuple[str, int, int]]) -> StepTime:
    """A step time model that measured these strategies, at these batch sizes and contexts."""
    time = StepTime(STRATEGIES)
    for name, batch, context in steps:
        strategy = STRATEGIES[INDEX[name]]
        time.learn(world.step(strategy, state_of(batch, context))[0], INDEX[name])
    return time


def errors(time: StepTime, world: World, batch: int, context: int) -> dict[str, float]:
    """Predicted relative to true, minus 1."""
    true_S = [world.seconds(each, batch, context, 1 + each.verify) for each in STRATEGIES]
    return dict(zip(map(str, STRATEGIES), time.predict(batch, context) / true_S - 1, strict=True))


MEASURED = ("off", "eagle-2", "eagle-5", "eagle-3x3x8", "ngram-4")


def test_strategies_batches_and_contexts_never_tried_are_predicted() -> None:
    world = World(**LINEAR)
    steps = [(MEASURED[n % 5], (1, 4, 24)[n // 5 % 3], 64 + 2 * n) for n in range(400)]
    time = timed(world, steps)
    for batch in (2, 8, 16):
        found = errors(time, world, batch, 512)
        assert max(abs(error) for error in found.values()) < 0.12, found


def test_a_handful_of_steps_is_enough_to_rank_strategies() -> None:
    world = World(**LINEAR)
    found = errors(timed(world, [(name, 4, 128) for name in MEASURED] * 2), world, 4, 128)
    assert max(found.values()) - min(found.values()) < 0.25, found


def test_what_no_step_informs_of_stays_as_it_was() -> None:
    world = World(**LINEAR)
    learned = [(MEASURED[n % 5], (1, 4, 24)[n // 5 % 3], 128) for n in range(200)]
    before = errors(timed(world, learned), world, 16, 128)
    after = errors(timed(world, learned + [("off", 1, 128)] * 3000), world, 16, 128)
    for name, error in before.items():
        assert after[name] == pytest.approx(error, abs=0.05), name


def test_first_steps_that_compile_and_interruptions_are_not_believed() -> None:
    world = World(**LINEAR)
    time = StepTime(STRATEGIES)
    for step in range(100):
        name = MEASURED[step % 5]
        facts, _ = world.step(STRATEGIES[INDEX[name]], state_of(4))
        slow = 100 if step < 5 else 8 if step % 17 == 0 else 1
        time.learn(replace(facts, seconds=facts.seconds * slow), INDEX[name])
    found = errors(time, world, 4, 128)
    assert max(found[name] for name in MEASURED) - min(found[name] for name in MEASURED) < 0.2, found


def test_a_measured_strategy_is_known_where_the_model_is_wrong() -> None:
    # twice as slow as anything else would suggest, at one size of the batch
    world = World(**LINEAR)
    time = timed(world, [(MEASURED[n % 5], (1, 4, 24)[n // 5 % 3], 128) for n in range(200)])
    tree = INDEX["eagle-4x4x12"]
    facts, _ = world.step(STRATEGIES[tree], state_of(8))
    for _ in range(30):
        time.learn(replace(facts, seconds=2 * facts.seconds), tree)
    found = errors(time, world, 8, 128)
    assert found["eagle-4x4x12"] == pytest.approx(1.0, abs=0.2)
    assert abs(found["eagle-2"]) < 0.2 and abs(errors(time, world, 1, 128)["off"]) < 0.15


def test_a_slower_machine_is_slower_for_all() -> None:
    world = World(**LINEAR)
    time = timed(world, [(MEASURED[n % 5], 4, 128) for n in range(200)])
    before = time.predict(4, 128)
    for _ in range(160):
        facts, _ = world.step(STRATEGIES[INDEX["eagle-2"]], state_of(4))
        time.learn(replace(facts, seconds=1.5 * facts.seconds), INDEX["eagle-2"])
    slower_S = time.predict(4, 128) / before
    assert slower_S[INDEX["eagle-2"]] == pytest.approx(1.5, abs=0.1)
    assert slower_S[INDEX["off"]] > 1.15 and slower_S[INDEX["eagle-5"]] > 1.15


def facts_of(name: str, batch: int, accepted: tuple[int, ...]) -> StepFacts:
    strategy = parse_strategy(name)
    return StepFacts(strategy, batch, 128, batch + sum(accepted), 0.01, 1 + strategy.verify, accepted)


def tokens(acceptance: Acceptance, name: str, batch: int, room: int = 1000) -> float:
    """Expected, a row."""
    return float(acceptance.expected_tokens(batch, remaining(batch, room))[INDEX[name]]) / batch


def test_chains_share_their_rates_and_what_remains_limits_them() -> None:
    acceptance = Acceptance(STRATEGIES)
    for _ in range(100):
        acceptance.learn(facts_of("eagle-3", 8, (6, 3, 3)))
    assert tokens(acceptance, "eagle-3", 8) == pytest.approx(1 + (6 + 3 + 3) / 8, rel=0.05)
    assert tokens(acceptance, "eagle-2", 8) == pytest.approx(1 + 9 / 8, rel=0.05)
    assert tokens(acceptance, "eagle-3", 8, room=2) == pytest.approx(1 + 6 / 8, rel=0.05)
    assert tokens(acceptance, "eagle-3", 8, room=1) == tokens(acceptance, "off", 8, room=1) == 1
    # each row has its own limit
    mixed_B = np.array([1, 2, 100, 100])
    total = float(acceptance.expected_tokens(4, mixed_B)[INDEX["eagle-3"]])
    assert total == pytest.approx(4 + 3 * 6 / 8 + 2 * (3 + 3) / 8, rel=0.1)


def test_trees_start_from_the_chains_and_share_what_they_catch() -> None:
    acceptance = Acceptance(STRATEGIES)
    for _ in range(100):
        acceptance.learn(facts_of("eagle-4", 10, (5, 3, 1, 0)))
    assert tokens(acceptance, "eagle-4", 10) < tokens(acceptance, "eagle-4x4x12", 10) < 4
    before = tokens(acceptance, "eagle-5x4x16", 10)
    for _ in range(100):
        acceptance.learn(facts_of("eagle-4x4x12", 10, (9, 8, 7, 6)))
    assert tokens(acceptance, "eagle-4x4x12", 10) == pytest.approx(4, rel=0.05)
    assert tokens(acceptance, "eagle-5x4x16", 10) > before + 0.5
    # and not the other way round
    assert tokens(acceptance, "eagle-4", 10) == pytest.approx(1.9, rel=0.05)


def test_rates_are_those_of_the_batch_size_and_elsewhere_those_of_all() -> None:
    acceptance = Acceptance(STRATEGIES)
    for _ in range(60):
        acceptance.learn(facts_of("eagle-2", 32, (8, 2)))
        acceptance.learn(facts_of("eagle-2", 2, (2, 2)))
    assert tokens(acceptance, "eagle-1", 32) < 1.35 and tokens(acceptance, "eagle-1", 2) > 1.85
    assert 1.27 < tokens(acceptance, "eagle-1", 8) < 1.9


def test_another_drafter_restarts_its_own_rates_softly() -> None:
    acceptance = Acceptance(STRATEGIES)
    for _ in range(100):
        acceptance.learn(facts_of("eagle-2", 8, (0, 0)))
        acceptance.learn(facts_of("eagle-3x3x8", 8, (0, 0, 0)))
        acceptance.learn(facts_of("ngram-2", 8, (0, 0)))
    before = {name: tokens(acceptance, name, 8) for name in ("eagle-2", "eagle-3x3x8", "ngram-2")}
    acceptance.restart()
    for _ in range(2):
        for name in before:
            acceptance.learn(facts_of(name, 8, (8,) * parse_strategy(name).depth))
    gained = {name: tokens(acceptance, name, 8) - before[name] for name in before}
    assert gained["eagle-2"] > 0.5 and gained["eagle-3x3x8"] > 0.5 and gained["ngram-2"] < 0.3


def test_ngram_steps_without_a_match_count_as_nothing_accepted() -> None:
    acceptance = Acceptance(STRATEGIES)
    for step in range(200):
        acceptance.learn(facts_of("ngram-4", 4, (4, 4, 4, 4) if step % 2 else ()))
    assert tokens(acceptance, "ngram-4", 4) == pytest.approx(3, rel=0.1)
    assert tokens(acceptance, "eagle-1", 4) == pytest.approx(1.7)


@pytest.mark.parametrize("loss", [0.05, 0.5, 0.95])
def test_trials_lose_no_more_than_they_may(loss: float) -> None:
    exploration = Exploration(STRATEGIES, seed=0)
    seconds_S = np.full(len(STRATEGIES), 0.01)
    rates_S = np.full(len(STRATEGIES), 100.0 * (1 - loss))
    rates_S[0] = 100.0
    lost, steps, tried = 0.0, 4000, 0
    for _ in range(steps):
        picked = exploration.pick(rates_S, seconds_S, 0.0, lambda: np.full(len(STRATEGIES), 0.3))
        if picked > 0:
            lost += float(exploration.trial_S[picked]) * 0.01 * loss
            tried += 1
        exploration.measured(max(picked, 0), 0.01)
    assert lost <= 0.01 * (AT_START + EARNED * steps)
    assert tried >= 3


def test_the_cost_model_stays_with_what_it_measures() -> None:
    """A start in which the first steps are slow and the batch shrinks without speculation: the fit must not drift away
    from steps that it sees all the time."""
    model, random = StepTime(STRATEGIES), Random(0)
    for step in range(400):
        batch = max(64 - step // 3, 4)
        slow = 6.0 if step < 3 else 3.0 if step < 20 else 1.0
        seconds = (4 + 0.2 * batch) * 1e-3 * slow * (1 + 0.5 * random.random())
        model.learn(StepFacts(OFF, batch, 40 + step, batch, seconds, 1), 0)
        if step == 4:
            seconds = 0.4  # a drafter's first step
            chained = STRATEGIES.index(parse_strategy("eagle-1"))
            model.learn(StepFacts(STRATEGIES[chained], batch, 44, batch, seconds, 2, (9,)), chained)
        if step > 60:
            assert 0.5 < model.predict(batch, 40 + step)[0] / ((4 + 0.2 * batch) * 1.25e-3) < 2, step
