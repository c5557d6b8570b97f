"""The sections of a run: each module has a function ``measure(recording, setup)``."""
