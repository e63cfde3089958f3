"""The gate speculates where that is faster, stays off where it isn't, and notices when that changes."""

from __future__ import annotations

from tlt_pipeline.engine.gate import LOOK_EVERY, TRIAL_STEPS, SpeculationGate


def run(gate: SpeculationGate, steps: int, batch: int, on: float, off: float) -> float:
    """Steps that bring `on` or `off` tokens a second; the share that speculated."""
    chosen = 0
    for _ in range(steps):
        speculated = gate.speculates(batch)
        chosen += speculated
        gate.measured(int(1000 * (on if speculated else off)), 1000.0)
    return chosen / steps


def test_takes_what_is_faster_but_for_short_looks_at_the_other():
    assert run(SpeculationGate(16), 500, 4, on=200, off=100) > 0.9
    assert run(SpeculationGate(16), 500, 4, on=50, off=100) < 0.12


def test_batch_sizes_are_judged_apart():
    gate = SpeculationGate(16)
    for _ in range(10):
        run(gate, 30, 1, on=300, off=100)
        run(gate, 30, 16, on=100, off=300)
    assert run(gate, 30, 1, on=300, off=100) > 0.8
    assert run(gate, 30, 16, on=100, off=300) < 0.2


def test_a_change_is_noticed_within_one_round_of_looks():
    gate = SpeculationGate(16)
    run(gate, 200, 2, on=50, off=100)
    run(gate, LOOK_EVERY + 8 * TRIAL_STEPS, 2, on=400, off=100)
    assert run(gate, 20, 2, on=400, off=100) > 0.8


def test_a_new_drafter_is_tried_at_once():
    gate = SpeculationGate(16)
    run(gate, 100, 2, on=50, off=100)
    gate.forget()
    assert gate.speculates(2)


def test_never_above_the_limit():
    gate = SpeculationGate(4)
    assert not any(gate.speculates(5) for _ in range(200))
