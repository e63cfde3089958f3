"""Pure decisions: admission and staleness, slots and leases, shard planning, accounting. No torch, no Redis,
no clock.

`decisions.decide(state, event, now) -> (state, commands)` is the whole of it; the service around it only
carries messages.
"""
