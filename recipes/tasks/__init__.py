"""The tasks that a recipe can train a model for."""
