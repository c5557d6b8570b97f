"""Traces recorded from MindSpore, and the code that replays them."""
