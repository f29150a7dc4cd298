"""Expert routing: top-K of E real experts and Z no-op columns."""
