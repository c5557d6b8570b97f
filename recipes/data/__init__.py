"""Sources of the training data of recipes."""
