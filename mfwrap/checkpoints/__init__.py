"""Checkpoints that are whole or absent, and what they hold beside the weights."""
