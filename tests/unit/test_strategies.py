"""Strategy policies on a simulated machine: near the best strategy at every batch size, and back when things change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_world import BATCHES, STRATEGIES, Outcome, World, run, state_of, tail

from tlt_pipeline.config import SpeculationConfig
from tlt_pipeline.engine.bandit import Bandit
from tlt_pipeline.engine.choice import make_policy
from tlt_pipeline.engine.goodput import Goodput
from tlt_pipeline.engine.strategies import (
    OFF,
    BatchState,
    Fixed,
    StepFacts,
    Strategy,
    StrategyPolicy,
    chain,
    parse_strategy,
    strategies_of,
)

WORLDS = {
    "useless drafter": World(right=0.05, caught=0.1, matches=0.05),
    "fair drafter": World(right=0.5),
    "good drafter": World(right=0.88),
    "repetitive text": World(right=0.3, matches=0.95, copied=0.93),
    # best at batch 1 an eagle tree, from batch 32 on nothing
    "trees": World(right=0.6, caught=0.8, per_token=0.1, free_rows=32),
    "rows are free, then dear": World(right=0.8, free_rows=64, per_token=0.05),
    "interrupted": World(right=0.7, noise=0.5, interrupted=0.03),
    "slow policy": World(
        right=0.75, base=80, per_row=2.5, per_token=1.2, free_rows=32, per_pass=9, per_drafted=0.1, per_tree=4
    ),
}
WITHOUT_DRAFTER = tuple(each for each in STRATEGIES if each.drafter != "eagle")


def policy_of(choice: str, seed: int = 0) -> StrategyPolicy:
    return Goodput(STRATEGIES, 64, seed) if choice == "goodput" else Bandit(STRATEGIES, 64, 0.05, seed)


def at(policy: StrategyPolicy, world: World, batch: int, steps: int) -> Outcome:
    return run(policy, world, [state_of(batch)] * steps)


def learned(choice: str, world: World, steps: int = 250) -> StrategyPolicy:
    policy = policy_of(choice)
    for batch in reversed(BATCHES):
        at(policy, world, batch, steps)
    return policy


@pytest.mark.parametrize("name", WORLDS)
def test_goodput_is_close_to_the_best_strategy_at_every_batch_size(name: str) -> None:
    world = replace(WORLDS[name])
    policy = learned("goodput", world)
    shares = {batch: at(policy, world, batch, 250).share for batch in BATCHES}
    assert min(shares.values()) > 0.86, shares
    assert np.mean(list(shares.values())) > 0.965, shares


@pytest.mark.parametrize("name", ["useless drafter", "good drafter", "trees"])
def test_the_bandit_is_close_to_the_best_strategy_at_every_batch_size(name: str) -> None:
    world = replace(WORLDS[name])
    policy = learned("beg_mab", world)
    shares = {batch: at(policy, world, batch, 250).share for batch in BATCHES}
    assert min(shares.values()) > 0.8, shares
    assert np.mean(list(shares.values())) > 0.92, shares


@pytest.mark.parametrize(("choice", "least"), [("goodput", 0.95), ("beg_mab", 0.85)])
def test_never_much_slower_than_without_speculation(choice: str, least: float) -> None:
    for name in ("useless drafter", "trees"):
        world = replace(WORLDS[name])
        policy = learned(choice, world)
        assert min(at(policy, world, batch, 300).of_off for batch in BATCHES) > least


@pytest.mark.parametrize(
    ("choice", "name", "least"),
    [
        ("goodput", "useless drafter", 0.95),
        ("goodput", "trees", 0.95),
        ("goodput", "rows are free, then dear", 0.92),
        ("beg_mab", "trees", 0.83),
    ],
)
def test_the_tail_is_decoded_in_little_more_than_the_least_time(choice: str, name: str, least: float) -> None:
    assert run(policy_of(choice), replace(WORLDS[name]), tail(3000)).share > least


def test_goodput_needs_no_trial_at_a_batch_size_it_never_saw() -> None:
    policy, world = policy_of("goodput"), World(right=0.85)
    run(policy, world, [state_of((2, 24)[step // 5 % 2]) for step in range(250)])
    assert at(policy, world, 8, 20).share > 0.9


@pytest.mark.parametrize("name", ["trees", "rows are free, then dear"])
def test_goodput_does_not_collapse_where_the_batch_swings_around_a_threshold(name: str) -> None:
    world = replace(WORLDS[name])
    policy = learned("goodput", world)
    for low in (3, 7, 14, 30):
        swinging = run(policy, world, [state_of(low + step % 5) for step in range(300)])
        assert swinging.share > 0.85 and swinging.of_off > 0.97, low


def test_goodput_stays_where_it_is_in_a_steady_world() -> None:
    # a trial is two switches
    for name in ("fair drafter", "trees"):
        world = replace(WORLDS[name])
        policy = learned("goodput", world)
        for batch in (1, 8, 32):
            at(policy, world, batch, 300)
            assert at(policy, world, batch, 500).switches <= 80, (name, batch)


def test_goodput_loses_little_by_trials() -> None:
    # nothing pays, and at this size everything else costs a multiple
    world = World(right=0.05, caught=0.1, matches=0.05, per_token=0.2)
    policy = policy_of("goodput")
    assert at(policy, world, 32, 500).of_off > 0.95
    assert at(policy, world, 32, 3000).of_off > 0.98


@pytest.mark.parametrize(("choice", "least"), [("goodput", 0.85), ("beg_mab", 0.85)])
def test_a_better_and_a_worse_drafter_are_noticed(choice: str, least: float) -> None:
    policy, bad, good = policy_of(choice), World(right=0.05, caught=0.1), World(right=0.9, seed=1)
    at(policy, bad, 2, 400)
    policy.new_drafter()
    at(policy, good, 2, 300)
    assert at(policy, good, 2, 200).share > least
    policy.new_drafter()
    at(policy, bad, 2, 300)
    assert at(policy, bad, 2, 200).share > least


def test_goodput_tries_a_drafter_that_was_of_no_use_for_long_once_there_are_new_versions() -> None:
    policy, bad, good = policy_of("goodput"), World(right=0.02, caught=0.05), World(right=0.85)
    for _ in range(8):
        used = at(policy, bad, 8, 500).chosen[100:]
        policy.new_drafter()
        # tried again, but seldom
        assert sum(each.drafter == "eagle" for each in used) < 25
    at(policy, good, 8, 800)
    assert at(policy, good, 8, 200).share > 0.93


def test_ngrams_are_noticed_when_the_text_begins_to_repeat_itself() -> None:
    policy, plain, repeating = policy_of("goodput"), World(right=0.5), World(right=0.5, matches=0.95, copied=0.95)
    at(policy, plain, 1, 1000)
    at(policy, repeating, 1, 3000)
    assert at(policy, repeating, 1, 200).share > 0.93


@pytest.mark.parametrize("choice", ["goodput", "beg_mab"])
def test_a_drafter_that_comes_late_and_goes_again(choice: str) -> None:
    policy, world = policy_of(choice), World(right=0.85)
    without, with_it = state_of(4, available=WITHOUT_DRAFTER), state_of(4)
    assert {each.drafter for each in run(policy, world, [without] * 300).chosen} == {"off", "ngram"}
    run(policy, world, [with_it] * 200)
    assert run(policy, world, [with_it] * 200).share > 0.9
    after = run(policy, world, [without] * 200)
    assert {each.drafter for each in after.chosen} <= {"off", "ngram"} and after.share > 0.85


def test_goodput_proposes_no_more_than_answers_may_still_get() -> None:
    world = World(right=0.95, per_context=0.0)
    policy = learned("goodput", world)
    assert run(policy, world, [state_of(1, tokens=1)] * 20).chosen.count(OFF) >= 18
    short = run(policy, world, [state_of(4, tokens=3)] * 100)
    assert short.share > 0.9 and max(each.depth for each in short.chosen) < 8
    # one row that may go on, among many that may not, is not worth deep proposals
    mixed = BatchState(16, 128, np.array([1] * 15 + [500]), STRATEGIES)
    assert run(policy, world, [mixed] * 100).share > 0.9


def test_goodput_follows_a_growing_context() -> None:
    world = World(right=0.8, per_context=0.08)
    policy = learned("goodput", world, 150)
    grown = run(policy, world, [state_of(8, 128 + 4 * step) for step in range(1000)])
    assert grown.share > 0.93


def test_goodput_survives_first_steps_that_compile() -> None:
    class Compiling(World):
        seen: frozenset[tuple[Strategy, int]] = frozenset()

        def step(self, strategy: Strategy, state: BatchState) -> tuple[StepFacts, float]:
            facts, seconds = super().step(strategy, state)
            first = (strategy, state.batch) not in self.seen
            self.seen = self.seen | {(strategy, state.batch)}
            return replace(facts, seconds=facts.seconds + 0.5 * first), seconds

    world = Compiling(right=0.85)
    policy = learned("goodput", world)
    assert min(at(policy, world, batch, 200).share for batch in BATCHES) > 0.9


def test_goodput_is_not_misled_by_others_that_slow_the_machine_down() -> None:
    world = World(right=0.8, slowed=2.0)
    policy = learned("goodput", world)
    assert np.mean([at(policy, world, batch, 480).share for batch in (1, 8, 32)]) > 0.93


@pytest.mark.parametrize("choice", ["goodput", "beg_mab", "fixed"])
def test_never_above_the_limit(choice: str) -> None:
    policy = make_policy(SpeculationConfig(choice=choice, max_batch=8))  # type: ignore[arg-type]
    available = strategies_of(SpeculationConfig())
    chosen = run(policy, World(right=0.9), [state_of(9, available=available)] * 50).chosen
    assert set(chosen) == {OFF}
    assert set(run(policy, World(right=0.9), [state_of(2, available=available)] * 200).chosen) != {OFF}


@pytest.mark.parametrize("choice", ["goodput", "beg_mab"])
def test_a_seed_repeats_the_choices(choice: str) -> None:
    def chosen(seed: int) -> list[Strategy]:
        return run(policy_of(choice, seed), World(right=0.5), [state_of(1 + step // 60) for step in range(600)]).chosen

    assert chosen(3) == chosen(3) != chosen(4)


def test_the_bandit_tries_every_arm_first_even_if_no_step_counts() -> None:
    policy, world = policy_of("beg_mab"), World()
    chosen = []
    for _ in range(3 * len(STRATEGIES)):
        chosen.append(policy.choose(state_of(4)))
        policy.measured(replace(world.step(chosen[-1], state_of(4))[0], counts=False))
    assert set(chosen) == set(STRATEGIES)
    # the likely ones first: nothing, then what verifies a few tokens a row
    assert chosen[0] == OFF and chosen[3].verify == 4 and chosen[-1] == parse_strategy("eagle-6x4x24")


FACTS = st.builds(
    StepFacts,
    strategy=st.sampled_from([*STRATEGIES, chain("eagle", 12)]),
    batch=st.integers(1, 100),
    context=st.integers(0, 1 << 20),
    committed=st.integers(0, 10_000),
    seconds=st.floats(0, 1e9) | st.sampled_from([float("nan"), float("inf"), 1e-300]),
    verified=st.integers(1, 65),
    accepted=st.lists(st.integers(0, 100), max_size=16).map(tuple),
    counts=st.booleans(),
)
STATES = st.builds(
    lambda remaining, context, available: BatchState(len(remaining), context, np.array(remaining), (OFF, *available)),
    st.lists(st.integers(1, 5000), min_size=1, max_size=80),
    st.integers(0, 1 << 20),
    st.lists(st.sampled_from(STRATEGIES[1:]), unique=True).map(tuple),
)
EVENTS = st.lists(st.one_of(FACTS, STATES, st.just("new drafter")), max_size=60)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("choice", ["goodput", "beg_mab"])
@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_whatever_was_measured_something_available_is_chosen(choice: str, events: list[object]) -> None:
    policy = policy_of(choice)
    for event in [*events, state_of(1), state_of(64)]:
        if isinstance(event, StepFacts):
            policy.measured(event)
        elif isinstance(event, BatchState):
            assert policy.choose(event) in event.available
        else:
            policy.new_drafter()


def test_fixed_is_fixed() -> None:
    tree = parse_strategy("eagle-3x3x8")
    assert Fixed(tree).choose(state_of(4)) == tree
    assert Fixed(tree).choose(state_of(4, available=WITHOUT_DRAFTER)) == OFF


def test_strategies_of_a_config() -> None:
    config = SpeculationConfig(depth=2, ngram_depths=(3,), trees=("3x2x5",))
    assert [str(each) for each in strategies_of(config)] == ["off", "ngram-3", "eagle-1", "eagle-2", "eagle-3x2x5"]
    assert strategies_of(SpeculationConfig(drafter="off")) == (OFF,)
