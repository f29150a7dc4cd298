"""What tools/sweep.py and tools/isoflop.py share: members of an experiment, running them, and their results."""
