"""What a recipe can train a model for."""
