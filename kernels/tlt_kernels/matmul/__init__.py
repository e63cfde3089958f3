"""A linear layer whose rows never change each other's bits."""
