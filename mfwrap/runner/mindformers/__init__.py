"""Convert MindFormers' YAML files to recipes."""
