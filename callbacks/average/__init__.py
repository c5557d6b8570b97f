"""Evaluate, export and save averaged weights during a training."""
