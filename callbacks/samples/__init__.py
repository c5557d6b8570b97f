"""What a model generates or predicts for a few inputs, while it is trained."""
