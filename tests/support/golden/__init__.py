"""Recorded MindSpore traces and how they are replayed."""
