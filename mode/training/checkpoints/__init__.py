"""Checkpoints: writing, checking, resuming, on this layout or another, and putting weights together."""
