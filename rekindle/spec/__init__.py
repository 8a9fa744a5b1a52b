"""What the user asked for: the YAML, read, checked and frozen."""
