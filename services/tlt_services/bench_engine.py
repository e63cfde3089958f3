"""`tlt bench engine`: how fast the engine decodes with each strategy, and with those that choose among them.

Consumes: a model folder or a run directory. Publishes: a table, a PNG, and (`--json`) a report. No Redis, no other
process. For each batch size all strategies take turns, round after round, so that what else the machine does meets all
of them; of a strategy's turns the median counts. `off_plain` computes as usual (`engine.exact: off`): the honest
baseline of all ratios; all others compute as configured, and must write the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch
import typer

from tlt_pipeline.config import EngineConfig
from tlt_pipeline.engine.choice import make_policy
from tlt_pipeline.engine.engine import Engine
from tlt_pipeline.engine.strategies import OFF, Fixed, Strategy, StrategyPolicy, strategies_of
from tlt_pipeline.messages import RolloutRequest
from tlt_services.bench_inputs import Inputs, Models, fit, load_inputs, widen
from tlt_services.bench_options import BenchOptions
from tlt_services.bench_report import Report, Row, TailReplay, draw_png, print_report, write_json
from tlt_services.bench_turns import Shrinking, Turn, decode_tail, decode_turn

OFF_PLAIN = "off_plain"
ADAPTIVE: tuple[Literal["beg_mab", "goodput"], ...] = ("beg_mab", "goodput")
TURN_S = 0.5
FEWEST_TOKENS, FEWEST_A_ROW = 64, 48
"""A turn decodes at least so many tokens, all in all and a row."""
LEARNING, LONGER = 2, 8
"""Rounds before the first that counts: caches fill, and what adapts learns, from turns so many times as long."""
TAIL_REPEATS = 3


def main(options: BenchOptions) -> int:
    """0: measured, all answers equal where that is claimed; 1: some differed. Raises what inputs and engine refuse."""
    inputs = load_inputs(options)
    torch.set_num_threads(options.threads or inputs.config.engine.threads or 1)
    bench = Bench(options, inputs)
    report = bench.measure()
    report.tail = bench.replay_tail()
    print_report(report)
    if options.json is not None:
        write_json(report, options.json)
    draw_png(report, options.png)
    same = report.identical == report.compared and report.tail.identical == report.tail.answers
    return 0 if same or report.claim != "exact" else 1


@dataclass
class Lane:
    """One row of the table in the making. `strategy`: None where it adapts."""

    name: str
    engine: Engine
    policy: StrategyPolicy
    strategy: Strategy | None = None
    turns: list[Turn] = field(default_factory=list[Turn])
    answers: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def ran(self) -> bool:
        """A strategy that the engine doesn't run here falls back to `off`."""
        if self.strategy is None:
            return True
        used = sum(turn.steps[str(self.strategy)] for turn in self.turns)
        return 2 * used > sum(turn.steps.total() for turn in self.turns)


class Bench:
    def __init__(self, options: BenchOptions, inputs: Inputs) -> None:
        self.options, self.inputs = options, inputs
        config = inputs.config.engine
        has_drafter = inputs.models.drafter is not None
        wanted = options.strategies or spread(strategies_of(widen(config.speculation, (), has_drafter)))
        self.speculation = widen(config.speculation, wanted, has_drafter)
        # the rows of the table and those of the tail share the engines
        rows = max(*options.batches, config.max_batch)
        self.config = config.model_copy(update={"max_batch": rows, "speculation": self.speculation})
        self.exact = self._engine(self.config)
        self.exact.set_drafter(inputs.models.drafter, inputs.models.drafter_version)
        self.plain = self._engine(self.config.model_copy(update={"exact": "off"}))
        self.fixed = [Lane(OFF_PLAIN, self.plain, Fixed(OFF), OFF)]
        self.fixed += [Lane(str(each), self.exact, Fixed(each), each) for each in wanted]
        self.adaptive = [Lane(f"adaptive:{name}", self.exact, self._policy(name)) for name in ADAPTIVE]

    def _engine(self, config: EngineConfig) -> Engine:
        models = self.inputs.models
        window = self.inputs.config.drafter.context_window
        return Engine(models.policy, models.policy_version, self.inputs.tokenizer, config, context_window=window)

    def _policy(self, choice: Literal["beg_mab", "goodput"]) -> StrategyPolicy:
        return make_policy(self.speculation.model_copy(update={"choice": choice}), self.options.seed)

    @property
    def _limit(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        most = self.inputs.models.policy.config.max_position_embeddings
        return min(self.config.max_context, most - self.exact.depth)

    # --- the table ---

    def measure(self) -> Report:
        """From the largest batch to the smallest, as a rollout goes: what adapts keeps what it learned."""
        models = self.inputs.models
        report = Report(
            model=self.options.model,
            dtype=str(self.inputs.dtype).removeprefix("torch."),
            claim=self.exact.claim,
            threads=torch.get_num_threads(),
            policy_version=models.policy_version,
            drafter_version=models.drafter_version,
        )
        requests = fit(self.inputs.requests, models.policy_version, self._limit)
        for batch in sorted(self.options.batches, reverse=True):
            report.rows = self._measure_batch(batch, requests, report) + report.rows
        return report

    def _measure_batch(self, batch: int, requests: Sequence[RolloutRequest], report: Report) -> list[Row]:
        lanes = [*self.fixed, *self.adaptive]
        for lane in lanes:
            lane.turns, lane.answers = [], {}
        tokens = self.options.tokens or self._choose_tokens(batch, requests)
        typer.echo(f"batch {batch}: {len(lanes)} strategies, turns of {tokens} tokens", err=True)
        for number in range(LEARNING + self.options.repeat):
            for place in range(len(lanes)):
                lane = lanes[(place + number) % len(lanes)]
                learns = lane.strategy is None and number < LEARNING
                least = LONGER * tokens if learns else tokens
                turn = decode_turn(lane.engine, lane.policy, requests, batch, least, lane.answers)
                lane.turns = [*lane.turns, turn] if number > LEARNING else [turn]
            lanes = [lane for lane in lanes if lane.ran()]
        report.cpu_share = min(report.cpu_share, median(turn.cpu_share for lane in lanes for turn in lane.turns))
        report.unavailable += [lane.name for lane in self.fixed if lane not in lanes]
        _compare_answers([lane.answers for lane in lanes if lane.engine is self.exact], report)
        return _make_rows(batch, lanes)

    def _choose_tokens(self, batch: int, requests: Sequence[RolloutRequest]) -> int:
        fewest = max(FEWEST_TOKENS, FEWEST_A_ROW * batch)
        trials = [decode_turn(self.plain, Fixed(OFF), requests, batch, fewest, {}) for _ in range(2)]
        return max(fewest, int(TURN_S * max(trial.tokens_per_s / min(trial.cpu_share, 1.0) for trial in trials)))

    # --- the tail ---

    def replay_tail(self) -> TailReplay:
        """The recorded batch to its end, `off` plain and the adaptive policies in turn; `off` as configured is what the
        answers are compared with."""
        tail, inputs = self.inputs.tail, self.inputs
        requests = fit(tail.requests, tail.models.policy_version, self._limit)
        self._load(tail.models)
        lanes = [self.fixed[0], Lane(str(OFF), self.exact, Fixed(OFF), OFF), *self.adaptive]
        runs: dict[str, list[Shrinking]] = {lane.name: [] for lane in lanes}
        most, repeats = inputs.config.engine.max_batch, min(self.options.repeat, TAIL_REPEATS)
        typer.echo(f"tail replay: {len(requests)} answers, {repeats + 1} times with {len(lanes)} strategies", err=True)
        for lane in self.adaptive:
            decode_tail(lane.engine, lane.policy, requests, most)
        for _ in range(repeats):
            for lane in lanes:
                runs[lane.name].append(decode_tail(lane.engine, lane.policy, requests, most))
        return self._compare(runs)

    def _load(self, models: Models) -> None:
        if models is self.inputs.models:
            return
        for engine in (self.plain, self.exact):
            engine.free()
            engine.set_policy(models.policy, models.policy_version)
        for lane in self.adaptive:
            self.exact.choice = lane.policy
            self.exact.set_drafter(models.drafter, models.drafter_version)

    def _compare(self, runs: dict[str, list[Shrinking]]) -> TailReplay:
        recorded = self.inputs.tail.recorded
        expected = runs[str(OFF)][0].answers
        exact = [run.answers for name, several in runs.items() if name != OFF_PLAIN for run in several]
        plain = runs[OFF_PLAIN][0].answers
        seconds = {name: median(run.seconds for run in several) for name, several in runs.items()}
        default = self.inputs.config.engine.speculation.choice
        chosen = "adaptive:" + ("goodput" if default == "fixed" else default)
        return TailReplay(
            off_s=seconds[OFF_PLAIN],
            adaptive_s=seconds[chosen],
            adaptive=chosen,
            seconds=seconds,
            batch=runs[chosen][0].full,
            answers=len(expected),
            longest=max(map(len, expected.values())),
            identical=sum(all(answers[name] == tokens for answers in exact) for name, tokens in expected.items()),
            as_recorded=sum(recorded[name] == tokens for name, tokens in expected.items()) if recorded else None,
            as_plain=sum(plain[name] == tokens for name, tokens in expected.items()),
            policy_version=self.inputs.tail.models.policy_version,
            drafter_version=self.inputs.tail.models.drafter_version,
        )


def spread(allowed: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Some of what a config allows: `off`, the middle n-gram depth, chains shallow, middle and deep, all trees."""
    ngrams = [each for each in allowed if each.drafter == "ngram"]
    chains = [each for each in allowed if each.drafter == "eagle" and not each.is_tree]
    few = {min(1, len(chains) - 1), len(chains) // 2, len(chains) - 1} if chains else set[int]()
    trees = [each for each in allowed if each.is_tree]
    return (OFF, *ngrams[len(ngrams) // 2 :][:1], *(chains[place] for place in sorted(few)), *trees)


def _compare_answers(answers: Sequence[dict[str, list[int]]], report: Report) -> None:
    """Where two wrote the same answer, the shorter is how the longer begins: turns end anywhere."""
    for name in {name for each in answers for name in each}:
        written = [each[name] for each in answers if name in each]
        if len(written) > 1:
            longest = max(written, key=len)
            report.compared += 1
            report.identical += all(tokens == longest[: len(tokens)] for tokens in written)


def _make_rows(batch: int, lanes: Sequence[Lane]) -> list[Row]:
    baseline = median(turn.tokens_per_s for turn in lanes[0].turns)
    return [
        Row(
            batch=batch,
            strategy=lane.name,
            tokens_per_s=median(turn.tokens_per_s for turn in lane.turns),
            acceptance_length=median(turn.acceptance_length for turn in lane.turns),
            step_ms=median(turn.step_ms for turn in lane.turns),
            ratio_to_off=median(turn.tokens_per_s for turn in lane.turns) / baseline,
        )
        for lane in lanes
    ]
