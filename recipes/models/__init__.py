"""Models and tokenizers of recipes."""
