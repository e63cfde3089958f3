"""Makes the keys and values of an accepted path contiguous."""
