"""The transformer: composes attention, feed-forward and routing into blocks."""
