"""Faults planted into trainings of many architectures, and what the monitor says about them."""
