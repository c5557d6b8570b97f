"""Healthy trainings with unusual numbers, on which each episode of the monitor is a false alarm."""
