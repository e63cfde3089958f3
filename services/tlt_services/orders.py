"""Between the scheduler's core and the wire: messages as events, commands as messages on their streams."""

from __future__ import annotations

import time

from tlt_pipeline import messages as m
from tlt_pipeline.bus import Outgoing
from tlt_pipeline.scheduling import events as e


def event_of(message: m.AnyMessage) -> e.Event:
    match message:
        case m.Completion():
            return e.CompletionSeen.of(message)
        case (
            m.RolloutRequest()
            | m.LeaseGranted()
            | m.ShardsAssigned()
            | m.LeaseRecalled()
            | m.DrafterRolledBack()
            | m.TrainStep()
            | m.Shutdown()
        ):
            raise AssertionError(f"a {message.kind} on a stream that refuses it")
        case event:
            return event


def order_of(command: e.GrantLease | e.AssignShards | e.RecallLease | e.RollBack | e.SendTrainStep) -> Outgoing:
    match command:
        case e.GrantLease(slot, holder, lease):
            role = "rollout" if holder == "rollout" else "drafter-trainer"
            return Outgoing(m.slot_commands(slot, role), m.LeaseGranted(slot=slot, holder=holder, lease=lease))
        case e.AssignShards(slot, lease, bodies):
            shards = tuple(shard for shard in map(m.decode, bodies) if isinstance(shard, m.HiddenShard))
            order = m.ShardsAssigned(slot=slot, lease=lease, shards=shards)
            return Outgoing(m.slot_commands(slot, "drafter-trainer"), order)
        case e.RecallLease(slot, lease, deadline_s):
            recall = m.LeaseRecalled(slot=slot, lease=lease, deadline_s=deadline_s, sent_at=time.time())
            return Outgoing(m.slot_commands(slot, "drafter-trainer"), recall)
        case e.RollBack(slot, version, to):
            order = m.DrafterRolledBack(slot=slot, version=version, to=to)
            return Outgoing(m.slot_commands(slot, "drafter-trainer"), order)
        case e.SendTrainStep(step, policy_version, request_ids, dead):
            train = m.TrainStep(step=step, policy_version=policy_version, request_ids=request_ids, dead=dead)
            return Outgoing(m.LEARNER_COMMANDS, train)
