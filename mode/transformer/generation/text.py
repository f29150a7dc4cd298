"""Tokens as text while they come. A character may be spelled by several tokens: it appears with the last of them."""

from __future__ import annotations

from mode.data.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no whole character
LONGEST_CHARACTER = 4  # bytes in UTF-8


class TextStream:
    """The text that each token adds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.shown: list[int] = []  # the last ids that made text: some decoders treat the first token of all otherwise
        self.waiting: list[int] = []

    def add(self, id: int) -> str:
        """What to print after one more token; nothing in the middle of a character."""
        self.waiting.append(id)
        text = self._text()
        if text.endswith(UNFINISHED) and len(self.waiting) < LONGEST_CHARACTER:
            return ""
        self.shown, self.waiting = self.waiting, []
        return text

    def rest(self) -> str:
        """What is left at the end: part of a character."""
        text = self._text() if self.waiting else ""
        self.shown, self.waiting = [], []
        return text

    def _text(self) -> str:
        return self.tokenizer.decode(self.shown + self.waiting)[len(self.tokenizer.decode(self.shown)) :]
