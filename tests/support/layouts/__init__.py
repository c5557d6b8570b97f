"""Train each layout of ranks, compare it with one process, and write the table in docs/ranks.md."""
