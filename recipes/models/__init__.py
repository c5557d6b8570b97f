"""Models and tokenizers that a recipe names."""
