"""What `tools/plan.py` works out and shows."""
