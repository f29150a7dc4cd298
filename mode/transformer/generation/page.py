"""An HTML page that needs no other file, and text on a coloured background.

The scale runs from pale yellow to dark blue and gets darker all the way, so it reads without colour vision, too.
"""

from __future__ import annotations

import html
import unicodedata

# ColorBrewer's YlGnBu, made for all kinds of colour vision.
SCALE = [
    (255, 255, 217),
    (199, 233, 180),
    (127, 205, 187),
    (65, 182, 196),
    (29, 145, 192),
    (34, 94, 168),
    (12, 44, 132),
]
UNPRINTABLE = "\ufffd"

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; color: #111; background: #fff; }}
pre {{ font-family: ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  tab-size: 4; }}
{style}
</style>
<h1>{title}</h1>
{body}
</html>
"""


def page(title: str, style: str, body: str) -> str:
    """`style` is added to the shared style sheet; `body` is HTML."""
    return PAGE.format(title=html.escape(title), style=style, body=body)


def colour(level: float) -> tuple[int, int, int]:
    """The scale at `level`, 0 to 1."""
    place = level * (len(SCALE) - 1)
    low = min(int(place), len(SCALE) - 2)
    share = place - low
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(SCALE[low], SCALE[low + 1], strict=True))
    return red, green, blue


def ink(background: tuple[int, int, int]) -> tuple[int, int, int]:
    """Black or white, whichever contrasts more."""
    linear = [(c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in background]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if luminance > 0.179 else (255, 255, 255)


def css(level: float) -> str:
    """The background of `level` and an ink that contrasts with it."""
    background = colour(level)
    return "background: rgb({}, {}, {}); ".format(*background) + "color: rgb({}, {}, {})".format(*ink(background))


def printable(text: str) -> str:
    """Replaces control characters, which a terminal would obey, by U+FFFD; tabs and line ends stay."""
    return "".join(c if c in "\t\n" or unicodedata.category(c) != "Cc" else UNPRINTABLE for c in text)


def escaped(text: str) -> str:
    """As HTML without control characters; a line's end is marked, so that its colour shows."""
    return html.escape(printable(text)).replace("\n", "&#8629;\n")
