"""Trainings with a planted fault."""
