"""The picture of routing decisions that training logs. Needs no matplotlib, which a training machine may lack."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

SKIPPED, WORKED = np.array([255, 255, 255]), np.array([8, 48, 107])
INK, LINE = (0, 0, 0), (217, 217, 217)
MOST_COLUMNS, MOST_ROWS = 1024, 640  # pixels; longer sequences are averaged, more blocks make a taller picture
LEFT, TOP, RIGHT, BOTTOM = 56, 44, 24, 56  # margins
FONT_SIZE, LEGEND = 14, 540


def draw_decisions(work_XL: Tensor) -> NDArray[np.uint8]:
    """[height, width, 3]: tokens across, blocks upward; dark where a block worked, white where it was skipped."""
    num_layers, length = work_XL.shape
    tokens_per_column = math.ceil(length / MOST_COLUMNS)
    columns_XC = F.avg_pool1d(work_XL.float(), tokens_per_column, ceil_mode=True).flip(0).numpy()
    cell_width = max(1, min(8, MOST_COLUMNS // columns_XC.shape[1]))
    cell_height = max(FONT_SIZE + 2, min(40, MOST_ROWS // num_layers))
    cells = _shade(columns_XC).repeat(cell_height, axis=0).repeat(cell_width, axis=1)
    cells[::cell_height] = LINE  # between blocks
    height, width = cells.shape[:2]

    image = Image.new("RGB", (max(width, LEGEND) + LEFT + RIGHT, height + TOP + BOTTOM), "white")
    image.paste(Image.fromarray(cells), (LEFT, TOP))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(FONT_SIZE)
    draw.rectangle((LEFT - 1, TOP - 1, LEFT + width, TOP + height), outline=INK)
    for layer in range(num_layers):
        middle = TOP + height - cell_height * (layer + 0.5)
        draw.text((LEFT - 8, middle), str(layer), fill=INK, font=font, anchor="rm")
    for token in range(0, length, _tick_distance(length)):
        x = LEFT + cell_width * (token / tokens_per_column + 0.5)
        draw.line((x, TOP + height, x, TOP + height + 5), fill=INK)
        draw.text((x, TOP + height + 8), str(token), fill=INK, font=font, anchor="mt")
    draw.text((8, TOP - 12), "block", fill=INK, font=font, anchor="ls")
    averaged = f"; a column is {tokens_per_column} tokens" if tokens_per_column > 1 else ""
    words = f"token (position in the sequence{averaged})"
    draw.text((LEFT, TOP + height + 30), words, fill=INK, font=font, anchor="lt")
    _legend(draw, font, work_XL)
    return np.asarray(image)


def _shade(work: NDArray[np.float32]) -> NDArray[np.uint8]:
    return (SKIPPED + work[..., None] * (WORKED - SKIPPED)).round().astype(np.uint8)


def _tick_distance(length: int) -> int:
    """1, 2 or 5 times a power of 10, for at most 11 ticks."""
    return next(
        step * 10**power for power in range(len(str(length))) for step in (1, 2, 5) if length <= 11 * step * 10**power
    )


def _legend(draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, work_XL: Tensor) -> None:
    entries = [(1.0, "processed by the block")]
    if bool(((work_XL > 0) & (work_XL < 1)).any()):
        entries.insert(0, (0.5, "attention, no-ops only"))
    if bool((work_XL == 0).any()):
        entries.insert(0, (0.0, "skipped the block"))
    x = LEFT
    for level, words in entries:
        red, green, blue = (int(part) for part in _shade(np.array([level], dtype=np.float32))[0])
        draw.rectangle((x, 10, x + FONT_SIZE, 10 + FONT_SIZE), fill=(red, green, blue), outline=INK)
        draw.text((x + FONT_SIZE + 6, 10 + FONT_SIZE // 2), words, fill=INK, font=font, anchor="lm")
        x += FONT_SIZE + 26 + round(draw.textlength(words, font=font))
