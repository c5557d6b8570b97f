"""Kill training processes, or make their file operations fail, and compare what they leave."""
