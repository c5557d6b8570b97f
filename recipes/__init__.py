"""Training runs that are ready to start: ``python -m mfwrap.recipes.<name>``."""
