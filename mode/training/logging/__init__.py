"""What a run tells: the terminal, metrics.jsonl, TensorBoard and the other files of a run directory."""
