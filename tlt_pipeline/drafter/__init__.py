"""The spot trainer: it keeps the drafter aligned with the policy, on time that was idle."""
