"""The account of strategies, and the metrics made of it: totals, however often they are updated."""

from __future__ import annotations

import engine_cases as cases
from prometheus_client import generate_latest

from tlt_pipeline.engine.engine import decode_all
from tlt_pipeline.telemetry.metrics import Metrics
from tlt_services.observing import StrategyMetrics, describe


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
    assert total("spec_decode_num_accepted_tokens_per_pos") == accepted
    assert total("not_speculated") == account.not_speculated["no_drafter"]
    assert 'strategy="eagle-3"' in text and 'strategy="off"' in text
    assert any(name.startswith("eagle-3@") for name in describe(account))
