"""Kernels for CPUs in C++, compiled at the first use. `functions` is the way in; nothing needs them."""
