"""Helpers that several callbacks share: values of a step, progress of a run, log, settings."""
