"""Depth routing: keep C of the L tokens of every sequence for a block."""
