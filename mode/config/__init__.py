"""Settings: what a section is, the sections of `"mode"`, and reading them from a file. Standard library only."""
