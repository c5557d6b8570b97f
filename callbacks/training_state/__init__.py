"""Norms, logits, expert loads and ranks of weights while a model trains."""
