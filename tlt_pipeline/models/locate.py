"""Where a model's folder is. No torch here: names are checked before anything heavy is imported."""

from __future__ import annotations


class ModelError(ValueError):
    """A model or tokenizer that can't be had, read or written; the text is one line with the remedy."""
