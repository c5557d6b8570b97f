"""Choose the cause of an anomaly from its evidence, by written rules."""
