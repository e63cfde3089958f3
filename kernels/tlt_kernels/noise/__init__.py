"""Gumbel noise, keyed by (seed, position, token id): the same bits as the engine's, wherever it is computed."""
