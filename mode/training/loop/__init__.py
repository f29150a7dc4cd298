"""The training loop: engine, steps, evaluation."""
