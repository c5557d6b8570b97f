"""Trainings under FSDP2."""
