"""Callbacks of MindSpore, for `Model`."""
