"""Healthy trainings, on which each episode of the monitor is a false alarm."""
