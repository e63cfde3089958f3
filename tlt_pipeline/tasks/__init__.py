"""Prompts and verifiers."""
