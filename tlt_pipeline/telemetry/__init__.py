"""Logging, metrics and the summary of a run; no torch."""
