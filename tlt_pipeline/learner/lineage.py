"""The line of policy versions that a learner extends, on disk: weights, and the optimizer state beside them.

The weight set of version v + 1 is what makes step v done: its state is written before it, so that whatever a
crash interrupts, the newest weights have a state to go on from, and a step is either there or trained again
from the same bits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_pipeline.config import RunConfig
from tlt_pipeline.learner.metrics import StepMetrics
from tlt_pipeline.learner.state import load_state, save_state, saved_versions
from tlt_pipeline.learner.trainer import Trainer
from tlt_pipeline.messages import WeightsPublished
from tlt_pipeline.models.checkpoint import load_decoder
from tlt_pipeline.models.decoder import Decoder
from tlt_pipeline.models.locate import locate_model
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.weights import WeightStore

STATES_KEPT = 3


@dataclass
class Lineage:
    """`published`: the newest version, which `trainer` holds."""

    config: RunConfig
    trainer: Trainer
    tokenizer: Tokenizer
    store: WeightStore
    states: Path
    published: WeightsPublished

    @classmethod
    def open(cls, config: RunConfig, run_dir: Path, log: Any) -> Lineage:
        """Goes on from the newest version in the run directory; writes version 0 from `policy.model` if there
        is none.

        Raises ModelError, WeightsError or StateError for what can't be loaded, NoSpace."""
        store, states = WeightStore.of_run(run_dir, config), RunDir(run_dir).checkpoints / "learner"
        published = store.latest("policy")
        if published is None:
            source = locate_model(config.policy.model)
            policy, tokenizer = load_decoder(source), load_tokenizer(source)
            published = store.write_policy(0, policy, tokenizer, parent=-1, step=-1)
        else:
            policy = store.load_policy(published)
            tokenizer = load_tokenizer(store.folder("policy", published.version))
        trainer = Trainer(
            config.learner,
            policy,
            config.seed,
            temperature=config.rollout.temperature,
            version=published.version,
            reference=_load_reference(config),
        )
        found = load_state(trainer, states)
        log.info("policy loaded", policy_version=trainer.version, state_of=found, updates=trainer.updates)
        if trainer.version > 0 and found != trainer.version:
            log.warning("optimizer moments are older than the weights (checkpoint.every)", state_of=found)
        return cls(config, trainer, tokenizer, store, states, published)

    def extend(self, step: int, metrics: StepMetrics) -> WeightsPublished:
        """Writes what the trainer now holds as the version after `step`."""
        version = self.trainer.version
        assert version == step + 1, (version, step)
        if version % self.config.checkpoint.every == 0 or version == self.config.steps:
            self.checkpoint()
        self.published = self.store.write_policy(
            version,
            self.trainer.policy,
            self.tokenizer,
            parent=self.published.version,
            step=step,
            metrics={**metrics.as_floats(), "written_at": time.time()},
        )
        return self.published

    def checkpoint(self) -> bool:
        """Saves the optimizer state of the version held, unless it is there; False in the middle of a
        step."""
        if not self.trainer.intact:
            return False
        if self.trainer.version not in saved_versions(self.states):
            save_state(self.trainer, self.states, STATES_KEPT)
        return True


def _load_reference(config: RunConfig) -> Decoder | None:
    return load_decoder(locate_model(config.policy.model)) if config.learner.kl_coef > 0 else None
