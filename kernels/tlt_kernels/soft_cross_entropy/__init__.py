"""The drafter's loss against the policy's whole distribution, and its slope, in two passes over the vocabulary."""
