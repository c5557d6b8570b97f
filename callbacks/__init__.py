"""Monitors of a training run, each a ``transformers.TrainerCallback``."""
