"""Continues text with a trained model.

    python tools/generate.py runs/mode "def main(" --temperature 0.8
    python tools/generate.py exported/mode --file prompt.py --file other.py
    python tools/generate.py runs/mode "import os" --show_routing --html routes.html
    python tools/generate.py runs/mode                      # asks for prompts

The model is a run directory (its newest whole checkpoint) or a folder that tools/export.py wrote; neither runs code.
One prompt is answered as the tokens come, several together as one batch. An empty prompt begins a new document.
Ctrl-C ends the text; a second one, or the end of input, leaves the interactive prompt. Control characters are printed
as U+FFFD; --json has the texts as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from mode.tooling import add_device, choose_device

INTERRUPTED = 130  # as shells report a process that Ctrl-C ended


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a run directory, a folder named step_N or an exported folder")
    parser.add_argument("prompts", nargs="*", metavar="prompt", help="text to continue; without any, it is asked for")
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file whose whole text is a prompt; - reads standard input",
    )
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of that step, given a run directory")
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        metavar="N",
        help="how much to add at most (default: 128, or less where the model has less room)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0: always the likeliest token (default)"
    )
    parser.add_argument("--top_k", type=int, metavar="K", help="choose among the K likeliest tokens")
    parser.add_argument(
        "--top_p", type=float, metavar="P", help="choose among the likeliest tokens that have probability P together"
    )
    parser.add_argument(
        "--repetition_penalty", type=float, default=1.0, metavar="X", help="above 1: repeats less (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random draws (default: 0)")
    parser.add_argument("--go_on", action="store_true", help="do not stop where the model ends a document")
    parser.add_argument(
        "--routing",
        choices=("predictor", "router"),
        help="what tokens decide their depth routing by (default: as mode.depth.causal says)",
    )
    parser.add_argument("--no_cache", action="store_true", help="compute everything again for every token")
    parser.add_argument(
        "--show_routing",
        action="store_true",
        help="print the text when it is complete, in colours: how many blocks processed each token, and no-op choices; "
        "where the output is no terminal or NO_COLOR is set, as a line per token",
    )
    parser.add_argument("--html", metavar="FILE", help="write the text in these colours as an HTML page")
    add_device(parser)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of the weights (default: as they are stored)")
    parser.add_argument("--json", action="store_true", help="print texts, tokens and figures as JSON, at the end")
    return parser.parse_args(arguments)


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """From the command line and files; what is not UTF-8 is replaced, and said so."""
    named = [
        (f"prompt {number}", text.encode(errors="surrogateescape")) for number, text in enumerate(arguments.prompts, 1)
    ]
    named += [(name, sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()) for name in arguments.file]
    texts = []
    for name, content in named:
        text = content.decode(errors="replace")
        if text.encode() != content:
            print(f"note: {name} is not all UTF-8; other bytes were replaced by U+FFFD", file=sys.stderr)
        texts.append(text)
    return texts


def has_colours(output: TextIO) -> bool:
    """Whether to print colour codes: on terminals, unless NO_COLOR (https://no-color.org) is set."""
    return output.isatty() and not os.environ.get("NO_COLOR")


def make_room(page: Path) -> None:
    """Makes the folder of the page, or says why it cannot be written, before anything is sampled."""
    if page.is_dir():
        raise ValueError(f"--html is {page}, a folder; name a file")
    page.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(page if page.exists() else page.parent, os.W_OK):
        raise ValueError(f"--html is {page}, which cannot be written; name another file")


class Session:
    """A model that continues prompts as the command line says."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from mode.training.checkpoints.load import load_model
        from mode.transformer.generation import Sampling
        from mode.transformer.pretrained import DTYPES

        self.arguments = arguments
        self.sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.repetition_penalty)
        dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
        self.device = choose_device(arguments.device)
        loaded = load_model(Path(arguments.model), arguments.step, device=self.device, dtype=dtype)
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        self.causal = arguments.routing or True

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [ids or [self.tokenizer.end_of_text] for ids in self.tokenizer.encode_batch(texts)]

    def answer(self, texts: list[str]) -> tuple[list[dict[str, Any]], bool]:
        """Continues and prints the prompts: (what came of each, whether Ctrl-C came in between)."""
        import torch

        from mode.transformer.generation import stream
        from mode.transformer.generation.page import printable
        from mode.transformer.generation.text import TextStream

        arguments, prompts = self.arguments, self.encode(texts)
        longest = max(map(len, prompts))
        room = self.model.config.model.sequence_length - longest
        num_new = max(0, min(128, room)) if arguments.max_new_tokens is None else arguments.max_new_tokens
        if room < 1 and arguments.max_new_tokens is None:
            num_new = 1  # for the error, which tells the lengths
        rows = [[self.tokenizer.end_of_text] * (longest - len(ids)) + ids for ids in prompts]
        tokens = stream(
            self.model,
            torch.tensor(rows, device=self.device),
            num_new,
            self.sampling,
            use_cache=not arguments.no_cache,
            lengths=torch.tensor([len(ids) for ids in prompts]),
            stop_tokens=() if arguments.go_on else (self.tokenizer.end_of_text,),
            seed=arguments.seed,
            causal=self.causal,
        )
        live = len(texts) == 1 and not arguments.json and not arguments.show_routing
        new: list[list[int]] = [[] for _ in prompts]
        ended, interrupted, started = [False] * len(prompts), False, time.perf_counter()
        text = TextStream(self.tokenizer)
        if live:
            print(printable(texts[0]), end="", flush=True)
        try:
            for ids in tokens:
                for row, id in enumerate(ids.tolist()):
                    if not ended[row]:
                        ended[row] = not arguments.go_on and id == self.tokenizer.end_of_text
                        new[row] += [] if ended[row] else [id]
                if live and not ended[0]:
                    print(printable(text.add(new[0][-1])), end="", flush=True)
        except KeyboardInterrupt:
            interrupted = True
        seconds = time.perf_counter() - started
        if live:
            print(printable(text.rest()))
        results = [
            {
                "prompt": prompt,
                "text": self.tokenizer.decode(ids),
                "prompt_tokens": len(before),
                "new_tokens": ids,
                "seconds": seconds,
            }
            for prompt, before, ids in zip(texts, prompts, new, strict=True)
        ]
        if not live and not arguments.json:
            self.print_all(prompts, results)
        if interrupted:
            print("interrupted", file=sys.stderr)
        return results, interrupted

    def routes(self, prompt: list[int], new: list[int]) -> Any:
        from mode.transformer.generation.show import token_routes

        return token_routes(self.model, self.tokenizer, prompt + new, len(prompt), self.causal)

    def print_all(self, prompts: list[list[int]], results: list[dict[str, Any]]) -> None:
        from mode.transformer.generation.page import printable
        from mode.transformer.generation.show import to_plain, to_terminal

        show = to_terminal if has_colours(sys.stdout) else to_plain
        for number, (ids, result) in enumerate(zip(prompts, results, strict=True), 1):
            if len(results) > 1:
                print(f"--- {number} of {len(results)}")
            if self.arguments.show_routing:
                print(show(self.routes(ids, result["new_tokens"])))
            else:
                print(printable(result["prompt"] + result["text"]))

    def write_html(self, results: list[dict[str, Any]]) -> None:
        """If the command line asks for it."""
        from mode.transformer.generation.show import to_html

        if self.arguments.html is None:
            return
        prompts = self.encode([result["prompt"] for result in results])
        texts = [self.routes(ids, result["new_tokens"]) for ids, result in zip(prompts, results, strict=True)]
        Path(self.arguments.html).write_text(to_html(texts, self.name), encoding="utf-8")


def ask(session: Session) -> int:
    """Prompts from the terminal, one line each, until the end of input."""
    print(f"{session.name}: a prompt, Enter; Ctrl-C stops a text, Ctrl-D leaves", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        try:
            results, _ = session.answer([text.encode(errors="surrogateescape").decode(errors="replace")])
            if session.arguments.json:
                print(json.dumps(results[0]), flush=True)
            session.write_html(results)
        except ValueError as error:  # one prompt that is too long is no reason to leave
            print(f"error: {error}", file=sys.stderr)


def main(command_line: list[str] | None = None) -> int:
    arguments = parse_arguments(command_line)
    try:
        texts = read_prompts(arguments)
        if arguments.html is not None:
            make_room(Path(arguments.html))
        session = Session(arguments)
        if not texts:
            return ask(session)
        results, interrupted = session.answer(texts)
        if arguments.json:
            print(json.dumps(results, indent=2))
        session.write_html(results)  # last: the texts are out, whatever happens to the file
        return INTERRUPTED if interrupted else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:  # settings, prompts, tokenizers and options: all say what to do
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: reading or writing failed: {error}", file=sys.stderr)
        return 4


if __name__ == "__main__":
    sys.exit(main())
