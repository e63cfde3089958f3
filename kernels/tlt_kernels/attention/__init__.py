"""Attention over the KV cache whose queries never change each other's bits, for chains and trees."""
