"""How a drafter trainer begins: the drafter of the run, the policy's frozen parts, the state on disk."""

from __future__ import annotations

import asyncio

import torch

from tlt_pipeline.actor import Actor
from tlt_pipeline.config import RunConfig
from tlt_pipeline.drafter.initial import fit_initial, load_initial
from tlt_pipeline.drafter.losses import FrozenParts
from tlt_pipeline.drafter.state import StateUnusable, restore, state_path
from tlt_pipeline.drafter.texts import TextWriter
from tlt_pipeline.drafter.trainer import DrafterTrainer
from tlt_pipeline.messages import WEIGHTS, WeightsPublished
from tlt_pipeline.models.decoder import Decoder, DecoderConfig
from tlt_pipeline.models.drafter import Drafter
from tlt_pipeline.models.dtypes import choose_device, choose_dtype
from tlt_pipeline.models.locate import locate_drafter
from tlt_pipeline.models.tokenizer import Tokenizer, load_tokenizer
from tlt_pipeline.rundir import RunDir
from tlt_pipeline.weights import WeightStore

TEXTS = 32
ANSWER_TOKENS = 64
"""The first drafter is fitted on so many answers of so many tokens: 1 s of a core for the quickstart's policy, 14 s for
SmolLM2."""


async def choose_first_drafter(actor: Actor, store: WeightStore, policy: WeightsPublished) -> WeightsPublished:
    """The newest published drafter. Where there is none yet, slot 0 publishes version 1 (or, on another Redis, the
    newest one in the run directory) and the other slots wait for it. Raises ModelError: `drafter.init` is no drafter
    for this policy."""
    if actor.slot != 0:
        who = "the first drafter version (is drafter-trainer --slot 0 running?)"
        found = await actor.wait_for(who, lambda: actor.bus.latest("drafter"))
        assert isinstance(found, WeightsPublished)
        return found
    known = await actor.bus.latest("drafter")
    if isinstance(known, WeightsPublished):
        return known
    published = store.latest("drafter")
    if published is None:
        version = await actor.bus.next_version("drafter")
        published = await asyncio.to_thread(_write_first, actor, store, policy, version)
    await actor.bus.broadcast(WEIGHTS, published, latest="drafter")
    actor.metrics.published.inc()
    actor.log.info("first drafter", drafter_version=published.version, init=actor.config.drafter.init)
    return published


def _write_first(actor: Actor, store: WeightStore, policy: WeightsPublished, version: int) -> WeightsPublished:
    device = choose_device(actor.config.engine.device)
    dtype = choose_dtype(actor.config.engine.dtype, device)
    loaded = store.load_policy(policy, dtype=dtype, device=device)
    drafter = start_drafter(actor.config, loaded, load_tokenizer(store.folder("policy", policy.version)))
    return store.write_drafter(version, drafter, parent=0, policy_version=policy.version, step=policy.step)


def start_drafter(config: RunConfig, policy: Decoder, tokenizer: Tokenizer) -> Drafter:
    """`drafter.init`: from_policy_layer, or the folder of a drafter (raises ModelError). float32."""
    folder = locate_drafter(config.drafter.init)
    if folder is not None:
        return load_initial(config, folder, policy.config)
    texts, _ = TextWriter(config, policy, tokenizer, ANSWER_TOKENS).write(0, TEXTS)
    return fit_initial(config, policy, texts)


def load_frozen(store: WeightStore, published: WeightsPublished, device: torch.device) -> FrozenParts:
    """Raises WeightsMissing if that version was pruned."""
    return FrozenParts.of(store.load_policy(published), published.version, device)


def open_trainer(
    actor: Actor, store: WeightStore, policy: WeightsPublished, published: WeightsPublished
) -> tuple[DrafterTrainer, DecoderConfig]:
    """The trainer of this slot at that policy and drafter version, gone on from its state on disk where there is
    one; and the policy's configuration."""
    assert actor.slot is not None
    device = choose_device(actor.config.engine.device)
    decoder = store.load_policy(policy)
    drafter = store.load_drafter(published, decoder.config)
    frozen = FrozenParts.of(decoder, policy.version, device)
    trained = published.version > 1 or locate_drafter(actor.config.drafter.init) is not None
    trainer = DrafterTrainer(actor.config, drafter, published.version, frozen, actor.slot, trained=trained)
    path = state_path(RunDir(actor.run_dir).checkpoints, actor.slot)
    try:
        if restore(trainer, path):
            actor.log.info("state restored", steps=trainer.steps, tokens=trainer.tokens_trained, parent=trainer.parent)
    except StateUnusable as error:
        actor.metrics.count_skipped("drafter_state_unusable")
        actor.log.warning("state not restored", reason=str(error))
    return trainer, decoder.config
