"""Training on the DeepSpeed engine: the loop, evaluation, checkpoints, and what a run writes down."""
