"""Sampling from a model: `generate` returns whole rows, `stream` the tokens as they come."""

from mode.transformer.generation.generate import generate, stream
from mode.transformer.generation.sampling import Sampling

__all__ = ["Sampling", "generate", "stream"]
