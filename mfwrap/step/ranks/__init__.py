"""What a step does on several ranks: reductions of gradients, decisions that all ranks share."""
