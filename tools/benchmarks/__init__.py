"""What `tools/benchmark.py` measures, one subcommand a file."""
