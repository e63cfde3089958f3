"""The learner: GRPO updates of the policy, and the supervised trainer that gives it a start."""
