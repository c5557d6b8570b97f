"""Norms of many tensors, shards, parameter groups, and reads that do not stop the host."""
