"""The best siblings of a draft tree's node: top-k of logits / T + noise, with their scores."""
