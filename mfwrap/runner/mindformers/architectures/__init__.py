"""The networks of MindFormers' files in the configurations of transformers."""
