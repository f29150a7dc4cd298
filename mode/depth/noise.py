"""Gaussian noise as a function of a key: the same on every device, rank and recomputation.

The stochastic control draws random numbers inside forward, and sampling draws one per new token. A running
generator would make them depend on the layout and on the other rows and, under activation checkpointing,
differ between the two runs of one forward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def keyed_noise(keys_B: Tensor, seed: int, layer: int, length: int) -> Tensor:
    """[B, length] standard normal float32 numbers; row b depends on (keys_B[b], seed, layer) alone."""
    return noise_at(keys_B, seed, layer, torch.arange(length, device=keys_B.device).expand(len(keys_B), -1))


def noise_at(keys_B: Tensor, seed: int, layer: int, positions_BL: Tensor) -> Tensor:
    """`keyed_noise` at the given places of each row."""
    stream_B1 = _stream(keys_B, seed, layer).unsqueeze(1)
    first_BL = _uniform(_mix(stream_B1 ^ 2 * positions_BL))
    second_BL = _uniform(_mix(stream_B1 ^ (2 * positions_BL + 1)))
    return (torch.sqrt(-2 * torch.log(first_BL)) * torch.cos(2 * math.pi * second_BL)).float()  # Box-Muller


def keyed_uniform(keys_B: Tensor, number: int) -> Tensor:
    """[B] float64 numbers, uniform in [0, 1); each depends on (keys_B[b], number) alone."""
    return 1 - _uniform(_mix(_mix(keys_B.to(torch.int64)) ^ number))


def _stream(keys_B: Tensor, seed: int, layer: int) -> Tensor:
    return _mix(_mix(_mix(keys_B.to(torch.int64)) ^ seed) ^ layer)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64: a bijection of 64-bit integers in which every input bit reaches every output bit."""
    x = x + -7046029254386353131
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 with the sign


def _uniform(x: Tensor) -> Tensor:
    """The top 53 bits as a float64 in (0, 1]."""
    return (_shift_right(x, 11).double() + 1) * 2.0**-53
