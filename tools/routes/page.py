"""The report as one HTML page that needs no other file: numbers, pictures, and the text coloured by compute spent."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mode.data.tokenizer import Tokenizer
from mode.transformer.generation.page import css, escaped, page
from mode.transformer.generation.text import TextStream

STYLE = """\
body { max-width: 75rem; }
pre { font-size: 13px; line-height: 1.5; }
pre.table { white-space: pre; overflow-x: auto; overflow-wrap: normal; }
pre.text { line-height: 1.9; }
pre.text span { padding: .2em 0; }
.scale { display: inline-block; padding: 0 .7rem; text-align: center; font-size: 13px; }
img { max-width: 100%; }
figure { margin: 1.5rem 0; }
figcaption { font-size: 14px; color: #333; }"""


@dataclass(frozen=True)
class Piece:
    """Some text and what its (last) token cost."""

    text: str
    flops: float
    about: str


def pieces(tokenizer: Tokenizer, ids: Sequence[int], flops_L: NDArray[np.float64], about: Sequence[str]) -> list[Piece]:
    """The text of a sequence. A character that several tokens spell stands with the last of them."""
    stream, found = TextStream(tokenizer), []
    for position, id in enumerate(ids):
        text = stream.add(int(id)) + (stream.rest() if position == len(ids) - 1 else "")
        if text:
            found.append(Piece(text, float(flops_L[position]), about[position]))
    return found


def to_html(title: str, table: str, pictures: Mapping[str, tuple[bytes, str]], texts: Sequence[Sequence[Piece]]) -> str:
    """`pictures`: a PNG file's bytes and what it shows, by name."""
    costs = [piece.flops for text in texts for piece in text]
    low, high = min(costs, default=0.0), max(costs, default=0.0)
    body = [
        f'<pre class="table">{html.escape(table)}</pre>',
        *(_picture(name, *picture) for name, picture in pictures.items()),
        f"<h2>Compute spent on each token</h2>\n<p>{_legend(low, high)}</p>",
        *(f'<pre class="text">{"".join(_span(piece, low, high) for piece in text)}</pre>' for text in texts),
    ]
    return page(title, STYLE, "\n".join(body))


def _picture(name: str, png: bytes, about: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    words = html.escape(about)
    return (
        f'<figure id="{html.escape(name)}"><img src="data:image/png;base64,{data}" alt="{words}">'
        f"<figcaption>{words}</figcaption></figure>"
    )


def _legend(low: float, high: float) -> str:
    if high <= low:
        return f"Every token costs the same, {_cost(low)} forward, so there is nothing to colour."
    steps = [low + (high - low) * step / 5 for step in range(6)]
    scale = "".join(f'<span class="scale" style="{_style(cost, low, high)}">{_cost(cost)}</span>' for cost in steps)
    return f"Forward FLOPs by token, from pale (fewest) to dark (most); point at a token for its numbers.<br>{scale}"


def _cost(flops: float) -> str:
    for limit, unit in ((1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"), (1e3, "KFLOPs")):
        if flops >= limit:
            return f"{flops / limit:.3g} {unit}"
    return f"{flops:.0f} FLOPs"


def _style(cost: float, low: float, high: float) -> str:
    return css((cost - low) / (high - low) if high > low else 0.0)


def _span(piece: Piece, low: float, high: float) -> str:
    about = html.escape(f"{_cost(piece.flops)}; {piece.about}")
    return f'<span style="{_style(piece.flops, low, high)}" title="{about}">{escaped(piece.text)}</span>'
