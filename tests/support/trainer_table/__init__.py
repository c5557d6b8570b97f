"""A table of what the stock Trainer and MFTrainer have in common, and its page in docs/."""
