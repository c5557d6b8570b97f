"""Helpers of several callbacks: values of a step, progress of a run, log, settings."""
