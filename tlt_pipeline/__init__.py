"""tlt-pipeline: RL of reasoning LLMs without the long-tail wait."""

__version__ = "0.1.0"
