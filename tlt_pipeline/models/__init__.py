"""The policy, the drafter, their checkpoints and tokenizers."""
