"""The account of strategies, and the metrics made of it: totals, however often they are updated."""

from __future__ import annotations

import engine_cases as cases
from prometheus_client import generate_latest

from tlt_pipeline.engine.accounts import StrategyAccount
from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.engine.strategies import OFF, StepFacts, chain, parse_strategy
from tlt_pipeline.telemetry.metrics import Metrics
from tlt_services.observing import StrategyMetrics, describe


def steps_of_all_kinds() -> StrategyAccount:
    account = StrategyAccount()
    ngram, tree = chain("ngram", 4), parse_strategy("eagle-3x2x5")
    account.add(StepFacts(OFF, 5, 100, 5, 0.5, 1), "no_drafter")
    account.add(StepFacts(ngram, 5, 100, 5, 0.5, 1), "no_drafter")
    account.add(StepFacts(ngram, 6, 100, 12, 0.5, 5, (2, 2, 1, 1), drafts=2), "no_drafter")
    account.add(StepFacts(ngram, 6, 100, 6, 0.5, 1), None)
    account.add(StepFacts(tree, 2, 100, 5, 1.0, 6, (2, 1, 0)), None)
    account.add(StepFacts(tree, 2, 100, 3, 1.0, 6, (1, 0, 0)), None)
    account.add(StepFacts(OFF, 9, 100, 9, 1.0, 1), "above_max_batch")
    return account


def test_an_account_tells_by_strategy_and_batch_what_was_proposed_and_accepted() -> None:
    account = steps_of_all_kinds()
    tree, ngram = account.uses["eagle-3x2x5", 2], account.uses["ngram-4", 8]
    assert (tree.steps, tree.tokens, tree.drafts, tree.draft_tokens, tree.accepted) == (2, 8, 4, 20, [3, 1, 0])
    assert tree.acceptance == [0.75, 0.25, 0.0] and tree.acceptance_length == 2.0 and tree.tokens_per_s == 4.0
    assert (ngram.steps, ngram.rows, ngram.drafts, ngram.draft_tokens) == (3, 17, 2, 8)
    assert account.share_of_time("eagle-3x2x5", 2) == 0.4 and account.share_of_time("off", 16) == 0.2
    assert account.switches == 3 and account.stand_ins == 2
    reasons = {"no_drafter": 1, "no_match": 2, "above_max_batch": 1}
    assert account.not_speculated == reasons


def test_metrics_and_the_log_have_all_of_the_account() -> None:
    account, metrics = steps_of_all_kinds(), Metrics("rollout", 0)
    told = StrategyMetrics(metrics)
    told.update(account)
    told.update(account)
    text = generate_latest(metrics.registry).decode()
    labels = 'batch="2",role="rollout",slot="0",strategy="eagle-3x2x5"'
    assert f"tlt:strategy_num_draft_tokens_total{{{labels}}} 20.0" in text
    positioned = labels.replace(",role", ',position="1",role')
    assert f"tlt:spec_decode_num_accepted_tokens_per_pos_total{{{positioned}}} 1.0" in text
    assert 'tlt:not_speculated_total{reason="no_match",role="rollout",slot="0"} 2.0' in text
    assert 'tlt:strategy_stand_ins_total{role="rollout",slot="0"} 2.0' in text
    line = describe(account)
    assert line["eagle-3x2x5@2"] == "40% of time, 4 tokens/s, acceptance length 2.00 (0.75 0.25 0.00)"
    assert line["off@16"] == "20% of time, 9 tokens/s"


def test_metrics_add_up_to_the_account() -> None:
    model = cases.policy()
    engine = cases.engine(model, batch=4, depth=3)
    metrics = Metrics("rollout", 0)
    told = StrategyMetrics(metrics)
    decode_all(engine, [cases.request(number) for number in range(3)])
    told.update(engine.account)
    engine.set_drafter(cases.drafter(model), 1)
    done = decode_all(engine, [cases.request(number) for number in range(3, 9)])
    told.update(engine.account)
    told.update(engine.account)
    account = engine.account
    assert sum(use.tokens for use in account.uses.values()) == engine.tokens_committed
    assert set(account.not_speculated) == {"no_drafter"} and account.switches == 1
    accepted = sum(sum(use.accepted) for use in account.uses.values())
    assert accepted == sum(answer.draft.accepted for answer in done)
    text = generate_latest(metrics.registry).decode()

    def total(name: str) -> float:
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"tlt:{name}_total{{"))

    assert total("strategy_tokens") == engine.tokens_committed
    assert total("strategy_steps") == sum(use.steps for use in account.uses.values())
    assert total("spec_decode_num_accepted_tokens_per_pos") == total("strategy_num_accepted_tokens") == accepted
    assert total("strategy_num_drafts") == sum(answer.draft.drafts for answer in done)
    assert total("strategy_num_draft_tokens") == sum(answer.draft.drafted for answer in done)
    assert total("not_speculated") == account.not_speculated["no_drafter"]
    assert 'strategy="eagle-3"' in text and 'strategy="off"' in text
    assert any(name.startswith("eagle-3@") for name in describe(account))
