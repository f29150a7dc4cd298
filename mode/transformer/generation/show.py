"""What the model did with each token of a text: in colour, in a terminal or as an HTML page, or in plain words.

The background says how many blocks processed the token; a token that chose mostly no-ops is underlined. Where all
blocks process all tokens, the background says how many no-ops it chose instead.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mode.data.tokenizer import Tokenizer
from mode.records import BlockRouting, flatten
from mode.transformer.generation.page import colour, css, escaped, ink, page, printable
from mode.transformer.generation.text import TextStream
from mode.transformer.model import ModeTransformer

RESET = "\x1b[0m"


@dataclass(frozen=True)
class TokenRoute:
    """A piece of text and what happened to its (last) token."""

    text: str
    blocks: tuple[int, ...]  # the layers that processed it
    choices: int  # of expert columns, over all blocks
    no_ops: int  # of these, no-ops
    is_prompt: bool


@dataclass(frozen=True)
class Routes:
    """The tokens of one text."""

    tokens: list[TokenRoute]
    num_tokens: int  # more than pieces of text where characters are spelled by several
    processed: list[int]  # how many tokens each block processed
    fewest: int  # blocks that processed one of the tokens
    most: int
    routes_depth: bool
    has_no_ops: bool

    @property
    def num_layers(self) -> int:
        return len(self.processed)

    def level(self, token: TokenRoute) -> float:
        """Where on the scale the token's background is: 0 to 1."""
        if self.routes_depth:
            return self.depth_level(len(token.blocks))
        return token.no_ops / max(token.choices, 1) if self.has_no_ops else 0.0

    def depth_level(self, num_blocks: int) -> float:
        return (num_blocks - self.fewest) / max(self.most - self.fewest, 1)

    def legend(self) -> str:
        """What the colours mean, in words."""
        if self.routes_depth:
            return f"background: processed by {self.fewest} (pale) to {self.most} (dark) of {self.num_layers} blocks"
        if self.has_no_ops:
            return "background: from no (pale) to only (dark) no-op choices"
        return "this model routes nothing that could be shown"

    def underline_legend(self) -> str:
        return "underlined: at least half of its expert choices are no-ops" if self.has_no_ops else ""


@torch.no_grad()
def token_routes(
    model: ModeTransformer, tokenizer: Tokenizer, ids: Sequence[int], num_prompt: int, causal: bool | str = True
) -> Routes:
    """By one causal forward pass over the whole text: the routes that sampling took, and the last token's."""
    was_training = model.training
    routing = model.eval()(torch.tensor([ids], device=model.embedding.weight.device), causal=causal).routing
    model.train(was_training)
    blocks: list[list[int]] = [[] for _ in ids]
    choices, no_ops = [0] * len(ids), [0] * len(ids)
    for record in routing:
        for position, chosen, skipped in _entered(record):
            blocks[position].append(record.layer)
            choices[position] += chosen
            no_ops[position] += skipped
    stream, tokens = TextStream(tokenizer), []
    for position, id in enumerate(ids):
        text = stream.add(int(id))
        if position in (num_prompt - 1, len(ids) - 1):
            text += stream.rest()
        if text:
            route = (tuple(blocks[position]), choices[position], no_ops[position])
            tokens.append(TokenRoute(text, *route, is_prompt=position < num_prompt))
    experts = model.config.experts
    has_no_ops = experts is not None and experts.num_no_ops > 0
    return Routes(
        tokens,
        num_tokens=len(ids),
        processed=[sum(layer in entered for entered in blocks) for layer in range(len(routing))],
        fewest=min(map(len, blocks)),
        most=max(map(len, blocks)),
        routes_depth=model.config.depth is not None,
        has_no_ops=has_no_ops,
    )


def _entered(record: BlockRouting) -> list[tuple[int, int, int]]:
    """(position, choices, no-op choices) of every token of the only row that the block processed."""
    positions = flatten(record.positions_BS, record.valid_BS).tolist()
    if record.experts is None:
        return [(position, 0, 0) for position in positions]
    choices_TK = record.experts.choices_TK
    no_ops = (choices_TK >= record.experts.num_experts).sum(dim=1).tolist()
    return [(position, choices_TK.shape[1], skipped) for position, skipped in zip(positions, no_ops, strict=True)]


def underlined(token: TokenRoute) -> bool:
    return token.choices > 0 and 2 * token.no_ops >= token.choices


def to_terminal(routes: Routes) -> str:
    """The text with ANSI colours, and what they mean."""
    parts = []
    for token in routes.tokens:
        background = colour(routes.level(token))
        style = "\x1b[48;2;{};{};{}m".format(*background) + "\x1b[38;2;{};{};{}m".format(*ink(background))
        style += "\x1b[4m" if underlined(token) else ""
        # A background does not run on over the end of a line.
        parts.append("\n".join(f"{style}{printable(line)}{RESET}" if line else "" for line in token.text.split("\n")))
    legend = "; ".join(filter(None, [routes.legend(), routes.underline_legend()]))
    return "".join(parts) + f"\n\n{legend}"


def to_plain(routes: Routes) -> str:
    """The text without colours, and below it a line per token with its numbers."""
    rows = [(repr(token.text), _numbers(routes, token)) for token in routes.tokens]
    width = max(len(text) for text, _ in rows)
    tokens = "\n".join(f"  {text:<{width}}  {numbers}" for text, numbers in rows)
    return printable("".join(token.text for token in routes.tokens)) + f"\n\n{tokens}"


STYLE = """\
body { max-width: 60rem; }
pre { font-size: 14px; line-height: 1.9; }
pre span { padding: .2em 0; }
.new { border-top: 2px solid #d55e00; }
.no-op { text-decoration: underline; text-decoration-thickness: 2px; text-underline-offset: 3px; }
.scale { display: inline-block; min-width: 2.5rem; text-align: center; font-size: 13px; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; font-variant-numeric: tabular-nums; }
th { border-bottom: 1px solid #888; }"""


def to_html(texts: Sequence[Routes], title: str) -> str:
    """A page that needs no other file. Pointing at a token tells its numbers."""
    assert texts
    fewest, most = min(routes.fewest for routes in texts), max(routes.most for routes in texts)
    texts = [dataclasses.replace(routes, fewest=fewest, most=most) for routes in texts]  # one scale for the page
    words = [texts[0].legend(), texts[0].underline_legend(), "line above: new tokens"]
    legend = "<br>".join(html.escape(line) for line in words if line)
    body = "\n".join([f"<p>{legend}<br>{_scale(texts[0])}</p>", *map(_text, texts)])
    return page(title, STYLE, body)


def _scale(routes: Routes) -> str:
    """The colours in use, each with its number."""
    steps: list[tuple[str, float]] = []
    if routes.routes_depth:
        steps = [(str(count), routes.depth_level(count)) for count in range(routes.fewest, routes.most + 1)]
    elif routes.has_no_ops:
        steps = [(f"{share}%", share / 100) for share in (0, 25, 50, 75, 100)]
    return "".join(f'<span class="scale" style="{css(level)}">{label}</span>' for label, level in steps)


def _text(routes: Routes) -> str:
    return f"<pre>{''.join(_span(routes, token) for token in routes.tokens)}</pre>\n{_table(routes)}"


def _numbers(routes: Routes, token: TokenRoute) -> str:
    """What happened to a token, in words."""
    about = f"processed by {len(token.blocks)} of {routes.num_layers} blocks"
    if routes.routes_depth:
        about += f": {', '.join(map(str, token.blocks)) or 'none'}"
    if routes.has_no_ops:
        about += f"; {token.no_ops} of {token.choices} choices are no-ops"
    return about


def _span(routes: Routes, token: TokenRoute) -> str:
    about = _numbers(routes, token)
    classes = [name for name, on in (("new", not token.is_prompt), ("no-op", underlined(token))) if on]
    style, text = css(routes.level(token)), escaped(token.text)
    return f'<span class="{" ".join(classes)}" style="{style}" title="{html.escape(about)}">{text}</span>'


def _table(routes: Routes) -> str:
    """How many tokens each block processed."""
    if not routes.routes_depth:
        return ""
    rows = "".join(
        f"<tr><td>{layer}</td><td>{count}</td><td>{count / routes.num_tokens:.1%}</td></tr>"
        for layer, count in enumerate(routes.processed)
    )
    return f"<table><tr><th>block</th><th>of {routes.num_tokens} tokens</th><th>share</th></tr>{rows}</table>"
