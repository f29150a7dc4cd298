"""What a run shows on a terminal and in TensorBoard's pictures."""

from __future__ import annotations

import os
import pty
import sys
import termios

import numpy as np
import pytest
import torch

from mode.training.logging import console
from mode.training.logging.picture import FONT_SIZE, LEFT, TOP, draw_decisions


def test_on_a_terminal_validation_losses_stay_above_the_bar(monkeypatch):
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    with os.fdopen(slave, "w") as terminal:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, terminal)
        shown = console.Console(start=0, total=40, active=True)
        for step in range(1, 5):
            shown.advance()
            values = {"loss/train": 5.0, "optim/lr": 0.1, "perf/tokens_per_second": 9.0}
            shown.report(step, values | ({"loss/val": 4.0 + step, "loss/val_causal": 3.0} if step % 2 == 0 else {}))
        shown.bar.refresh()
        monkeypatch.undo()
        lines = os.read(master, 100_000).decode().split("\r\n")
        shown.bar.close()
    os.close(master)
    visible = [line.split("\r")[-1] for line in lines]  # what later text has not overwritten
    assert visible[:2] == [f"step      {step}/40  loss 5.0000  val {step + 4}.0000  causal 3.0000" for step in (2, 4)]
    assert len(visible) == 3 and "4/40" in visible[2] and "loss=5.0000, tok/s=9" in visible[2]


@pytest.mark.parametrize(("layers", "length"), [(2, 32), (4, 256), (40, 5000)])
def test_the_picture_of_decisions_has_labelled_axes_and_rows_that_can_be_told_apart(layers, length):
    work_XL = torch.ones(layers, length)
    work_XL[1, : length // 2] = 0
    image = draw_decisions(work_XL)
    height, width, _ = image.shape
    assert width <= 1200 and height > TOP + layers * FONT_SIZE
    dark = (image < 128).all(axis=-1)
    bottom = TOP + dark[TOP:, LEFT - 1].argmin()  # where the frame ends
    row = (bottom - 1 - TOP) / layers
    assert row >= FONT_SIZE + 2 and dark[TOP - 1, LEFT - 1 : LEFT + 100].all()
    middle = [int(bottom - 1 - row * (layer + 0.5)) for layer in range(layers)]
    for layer in range(layers):
        label = dark[middle[layer] - 5 : middle[layer] + 5, : LEFT - 4]
        assert label.any(), f"block {layer} has its number"
        skipped = np.array([255, 255, 255]) if layer == 1 else np.array([8, 48, 107])
        assert (image[middle[layer], LEFT + 2] == skipped).all()
    assert dark[bottom + 4 : bottom + 20, LEFT:].any(), "positions below"
    assert dark[bottom + 26 :, LEFT:].any() and dark[: TOP - 4].any(), "and words"
