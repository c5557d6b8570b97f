"""Measure and test mfwrap on a GPU in one command: ``make device``."""
