"""One message of each kind, for tests."""

from __future__ import annotations

from typing import Any

from tlt_pipeline import messages as m


def request(number: int = 0, **changes: Any) -> m.RolloutRequest:
    fields: dict[str, Any] = {
        "request_id": f"s00000-p000-{number:02d}",
        "group_id": "s00000-p000",
        "step": 0,
        "index": number,
        "policy_version": 0,
        "seed": number,
        "prompt": m.Array.of([1, 2, 3]),
        "sampling": m.Sampling(max_new_tokens=16, stop=("\n",)),
        "source": "chain_sum",
        "entry": '{"answer": "4"}',
    }
    return m.RolloutRequest(**(fields | changes))


def completion(of: m.RolloutRequest, **changes: Any) -> m.Completion:
    fields: dict[str, Any] = {
        "request_id": of.request_id,
        "group_id": of.group_id,
        "step": of.step,
        "index": of.index,
        "purpose": of.purpose,
        "policy_version": of.policy_version,
        "seed": of.seed,
        "prompt": of.prompt,
        "tokens": m.Array.of([7, 8]),
        "logprobs": m.Array.of([-0.5, -0.25], "float32"),
        "policy_logprobs": m.Array.of([-0.5, -0.25], "float32"),
        "finish_reason": "stop",
        "reward": 1.0,
        "claim": "exact",
        "draft": m.DraftStats(drafts=1, drafted=4, accepted=2, accepted_by_position=(1, 1), decode_steps=1),
        "slot": 0,
        "attempt": 1,
        "started_at": 1.5,
        "finished_at": 2.5,
    }
    return m.Completion(**(fields | changes))


def shard() -> m.HiddenShard:
    blob = m.BlobRef(name="shard-1.safetensors", size=3, sha256="0" * 64)
    return m.HiddenShard(
        shard_id="shard-1",
        blob=blob,
        slot=0,
        step=0,
        policy_version=0,
        documents=2,
        tokens=9,
        held_out=False,
    )


def weights(version: int = 1, model: m.ModelKind = "policy") -> m.WeightsPublished:
    return m.WeightsPublished(
        model=model,
        version=version,
        parent=version - 1,
        policy_version=version,
        step=version,
        path=f"{model}/v{version:06d}",
        size=1,
        sha256="0" * 64,
        metrics={"loss": 0.5},
    )


def one_of_each() -> list[m.AnyMessage]:
    stamp: dict[str, Any] = {"slot": 1, "worker": "rollout-1", "at": 3.25}
    return [
        request(),
        completion(request()),
        m.DeadLetter(stream=m.REQUESTS, entry_id="1-0", reason="no", attempts=3, body=b"\xff", request_id="r"),
        shard(),
        weights(),
        m.WorkerStarted(role="rollout", **stamp),
        m.WorkerHeartbeat(role="rollout", lease=4, running=3, tokens_per_s=9.5, **stamp),
        m.WorkerIdle(lease=4, **stamp),
        m.WorkerYielded(
            lease=4, seconds=0.5, trained_s=3.0, tokens_trained=100, reason="recalled", counts={"a": 1}, **stamp
        ),
        m.StepTrained(step=1, policy_version=2, trained=8, learner_s=0.5, metrics={"kl": 0.0}, **stamp),
        m.RunFailed(reason="NaN in the loss", **stamp),
        m.LeaseGranted(slot=0, holder="rollout", lease=1),
        m.ShardsAssigned(slot=0, lease=1, shards=(shard(), shard())),
        m.LeaseRecalled(slot=0, lease=1, deadline_s=1.0, sent_at=4.0),
        m.DrafterRolledBack(slot=0, version=3, to=2),
        m.TrainStep(step=0, policy_version=0, request_ids=("a", "b"), dead=1),
        m.Shutdown(reason="done"),
    ]
