"""The processes: one module each, wiring only."""
