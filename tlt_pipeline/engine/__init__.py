"""The adaptive rollout engine."""
