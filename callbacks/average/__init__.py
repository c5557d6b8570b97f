"""Averages of the weights beside a training: evaluated, exported, saved."""
