"""Arithmetic on lists of tensors: norms, shards, groups, and reads that do not wait."""
