"""Where the samples of a recipe come from."""
