"""Say what to write for the names of MindSpore and MindFormers in a script."""
