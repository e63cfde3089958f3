"""Prometheus metrics of one process, named after vLLM's where it has the same one (`tlt:` for `vllm:`).

No ids as labels. The endpoint listens on 127.0.0.1 unless `telemetry.metrics_host` says otherwise.
"""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from tlt_pipeline.config import ConfigError, TelemetryConfig

GAUGES = {
    "lease": ("tlt:slot_lease", "Number of the lease that this process knows of."),
    "running": ("tlt:num_requests_running", "Answers being written."),
    "tokens_per_s": ("tlt:generation_throughput_toks_per_s", "Tokens committed a second, lately."),
    "acceptance_length": ("tlt:spec_decode_acceptance_length", "1 + accepted / drafts, lately."),
    "policy_version": ("tlt:policy_version", "Policy version in use."),
    "drafter_version": ("tlt:drafter_version", "Drafter version in use."),
}
_COUNTERS = {
    "prompt_tokens": ("tlt:prompt_tokens", "Prompt tokens read."),
    "generation_tokens": ("tlt:generation_tokens", "Tokens committed to answers."),
    "requests": ("tlt:request_success", "Answers finished."),
    "drafts": ("tlt:spec_decode_num_drafts", "Verify passes that had a proposal."),
    "draft_tokens": ("tlt:spec_decode_num_draft_tokens", "Tokens proposed."),
    "accepted_tokens": ("tlt:spec_decode_num_accepted_tokens", "Proposed tokens accepted."),
    "trained_tokens": ("tlt:trained_tokens", "Tokens trained on, by learner or drafter trainer."),
    "published": ("tlt:weights_published", "Weight versions published."),
    "switches": ("tlt:strategy_switches", "Decode steps with another strategy than the one before."),
    "stand_ins": ("tlt:strategy_stand_ins", "Decode steps in which n-grams stood in for a drafter not there yet."),
}
_BY_STRATEGY = {
    "steps": ("tlt:strategy_steps", "Decode steps."),
    "tokens": ("tlt:strategy_tokens", "Tokens committed."),
    "seconds": ("tlt:strategy_seconds", "Seconds spent."),
    "drafts": ("tlt:strategy_num_drafts", "Rows that had a proposal to verify."),
    "draft_tokens": ("tlt:strategy_num_draft_tokens", "Tokens proposed."),
    "accepted_tokens": ("tlt:strategy_num_accepted_tokens", "Proposed tokens accepted."),
}
"""Labels: strategy, and batch: running answers, rounded up to a power of two. While steps run; the totals that vLLM has
too are counted when an answer is done."""


class Metrics:
    """One registry a process. Counters are attributes (`metrics.drafts.inc(3)`); `set(name, value)` a gauge
    of `GAUGES`; `count_skipped(reason)` whatever was left undone, so that nothing is skipped silently."""

    prompt_tokens: Counter
    generation_tokens: Counter
    requests: Counter
    drafts: Counter
    draft_tokens: Counter
    accepted_tokens: Counter
    trained_tokens: Counter
    published: Counter
    switches: Counter
    stand_ins: Counter

    def __init__(self, role: str, slot: int | None) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"role": role, "slot": "" if slot is None else str(slot)}
        self._gauges: dict[str, Gauge] = {}
        for attribute, (name, text) in _COUNTERS.items():
            setattr(self, attribute, self._counter(name, text))
        self._skipped = self._labelled("tlt:skipped", "Work left undone.", "reason")
        self._not_speculated = self._labelled("tlt:not_speculated", "Decode steps without a proposal.", "reason")
        self._accepted = self._labelled(
            "tlt:spec_decode_num_accepted_tokens_per_pos", "Proposed tokens accepted.", "strategy", "batch", "position"
        )
        self._by_strategy = {
            key: self._labelled(name, text, "strategy", "batch") for key, (name, text) in _BY_STRATEGY.items()
        }
        self._server: tuple[Any, threading.Thread] | None = None

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [*self._labels, *labels], registry=self.registry)

    def count_steps(self, strategy: str, batch: int, **amounts: float) -> None:
        """Adds what a strategy did at a batch size: see `_BY_STRATEGY`."""
        for key, amount in amounts.items():
            self._by_strategy[key].labels(**self._labels, strategy=strategy, batch=str(batch)).inc(amount)

    def count_accepted(self, strategy: str, batch: int, position: int, amount: int) -> None:
        labels = {**self._labels, "strategy": strategy, "batch": str(batch), "position": str(position)}
        self._accepted.labels(**labels).inc(amount)

    def count_not_speculated(self, reason: str, amount: int) -> None:
        self._not_speculated.labels(**self._labels, reason=reason).inc(amount)

    def set(self, name: str, value: float) -> None:
        if name not in self._gauges:
            metric, text = GAUGES.get(name, (f"tlt:{name}", name.replace("_", " ")))
            gauge = Gauge(metric, text, list(self._labels), registry=self.registry)
            self._gauges[name] = gauge.labels(**self._labels)
        self._gauges[name].set(value)

    def count_skipped(self, reason: str, amount: int = 1) -> None:
        """`reason`: one of a few fixed words, never an id."""
        self._skipped.labels(**self._labels, reason=reason).inc(amount)

    def serve(self, config: TelemetryConfig, role: str, slot: int | None) -> str | None:
        """Starts the endpoint; its address, or None where it is off. Raises ConfigError if the port is
        taken."""
        if config.metrics_port == 0:
            return None
        port = metrics_port(config, role, slot)
        try:
            self._server = start_http_server(port, addr=config.metrics_host, registry=self.registry)
        except OSError as error:
            raise ConfigError(
                f"metrics port {config.metrics_host}:{port} of {role} can't be opened "
                f"({error.strerror or error}): set telemetry.metrics_port to a free range, or to 0 to do without"
            ) from error
        return f"http://{config.metrics_host}:{port}/metrics"

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None


def metrics_port(config: TelemetryConfig, role: str, slot: int | None) -> int:
    """First port: scheduler; then learner, rollout 0, drafter-trainer 0, rollout 1, …"""
    offsets = {"scheduler": 0, "learner": 1, "rollout": 2, "drafter-trainer": 3}
    return config.metrics_port + offsets[role] + 2 * (slot or 0)
