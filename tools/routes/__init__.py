"""The parts of tools/routing.py."""
