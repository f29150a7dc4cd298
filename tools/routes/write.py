"""A report's files: numbers, pictures, the page, and the pictures once more for TensorBoard."""

from __future__ import annotations

import io
import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from mode.config.settings import ModeConfig
from mode.runs import RunError, read_run
from mode.training.checkpoints.checkpoint import step_of
from mode.training.checkpoints.load import Loaded
from mode.training.logging.run_files import EVENTS
from mode.transformer.pretrained import WEIGHTS

from . import page, plots
from .survey import Survey, work
from .table import NAMES, render

PREDICTOR, KEPT = "depth/predictor_accuracy", "depth/kept_fraction"
TAG = "routing_report"  # of the pictures in TensorBoard; training has routing/decisions
Pictures = dict[str, tuple[Figure, str]]  # each with what it shows


def write_report(
    report: dict[str, Any],
    loaded: Loaded,
    shown: Survey,
    flops_NL: NDArray[np.float64],
    *,
    output: Path | None,
    tensorboard: bool,
    num_texts: int,
) -> dict[str, Any]:
    """Returns the report with where everything is."""
    config, source = loaded.model.config, loaded.source.resolve()
    run = None if (source / WEIGHTS).is_file() else source.parent.parent
    default = source.with_name(source.name + "_routing") if run is None else run / "routing"
    folder = default if output is None else output
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {name: (to_png(figure), about) for name, (figure, about) in draw(config, report, shown, run).items()}
    pngs = {name: png for name, (png, _) in pictures.items()}
    for name, png in pngs.items():
        (folder / f"{name}.png").write_bytes(png)
    board = to_tensorboard(board_folder(run), step_of(source), pngs) if run is not None and tensorboard else None
    report = report | {
        "output": str(folder),
        "pictures": [f"{name}.png" for name in pictures],
        "tensorboard": None if board is None else str(board),
    }
    (folder / "routing.json").write_text(json.dumps(report, indent=1) + "\n")
    texts = []
    for row in range(min(num_texts, len(flops_NL))):
        about = [describe(config, shown, row, position) for position in range(flops_NL.shape[1])]
        texts.append(page.pieces(loaded.tokenizer, shown.ids_NL[row].tolist(), flops_NL[row], about))
    text = page.to_html(f"Routing of {loaded.name}", render(report), pictures, texts)
    (folder / "routing.html").write_text(text, encoding="utf-8")
    return report


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def draw(config: ModeConfig, report: dict[str, Any], shown: Survey, run: Path | None) -> Pictures:
    """Each picture that the model has something for, with what it shows."""
    name, has_no_ops = NAMES[report["shown"]], config.experts is not None and config.experts.num_no_ops > 0
    by = f" ({name})" if config.depth is not None else ""
    drawn: Pictures = {}
    if config.depth is not None or has_no_ops:
        top_k = None if config.experts is None else config.experts.top_k
        drawn["decisions"] = (
            plots.decisions(work(config, shown, 0), top_k, has_no_ops, f"Routing decisions{by}, one held-out sequence"),
            "Which block worked on which token of the first sequence; darker is more work.",
        )
    if report["depth"] is not None and report["depth"]["blocks"]:
        held = config.depth is not None and config.depth.aux_loss is not None
        drawn["router_weights"] = (
            plots.router_weights(report["depth"], f"Router weights of all routed blocks{by}"),
            "Router weights, and the share of them above 0.5 beside the tokens kept. depth.aux_loss, which pulls that "
            f"share toward the capacity, is {'set' if held else 'not set here'}.",
        )
    trained = None if run is None else predictor_accuracy(run)
    if trained is not None:
        drawn["predictor"] = (
            plots.predictor(*trained, report["depth"], "The predictor in training"),
            "How often the predictor agreed with top-k. A token cannot know how its sequence compares with others, so "
            "even the best threshold of the router's own logit does not always agree.",
        )
    if report["entropy"]["by"]:
        drawn["entropy"] = (
            plots.entropy(report["entropy"]["by"], f"Work on a token and the entropy of its prediction{by}"),
            "Do tokens whose prediction is uncertain get more work? Spearman's rank correlation over all tokens.",
        )
    if report["experts"] is not None:
        drawn["experts"] = (
            plots.expert_load(report["experts"], f"Load of the real experts{by}"),
            "How often each expert was chosen, and the choices that went to no-ops; max/mean is over real experts.",
        )
    return drawn


def predictor_accuracy(run: Path) -> tuple[list[int], list[float], list[float]] | None:
    """(steps, shares it was right about, shares kept) as logged in training; None where there are none."""
    try:
        logged = read_run(run)
    except RunError:
        return None
    right, kept = logged.values(PREDICTOR), logged.values(KEPT)
    return (list(right), list(right.values()), [kept[step] for step in right]) if right else None


def board_folder(run: Path) -> Path:
    """Where the run writes its own events."""
    try:
        settings = json.loads((run / "config.json").read_text()).get("tensorboard") or {}
    except (OSError, ValueError, AttributeError):
        settings = {}
    if settings.get("output_path"):
        run = Path(settings["output_path"], settings.get("job_name") or run.name)
    return run


def to_tensorboard(folder: Path, step: int, pngs: dict[str, bytes]) -> Path | None:
    """Adds the pictures to the run that has its events in `folder`; None where there are none: it would be a new run.

    A later report of the same step replaces the earlier one. TensorBoard takes any file with "tfevents" in its name,
    in the order of names, and may read on only in the last one. So this name comes before that of the run's own
    events, which may still be written to, and does not match theirs, which a resumed run rewrites.
    """
    if not any(folder.glob(EVENTS)):
        return None
    file = folder / f"added_by_routing.step_{step:08d}.tfevents"
    with file.open("wb") as opened:
        writer = RecordWriter(opened)
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        for name, png in pngs.items():
            width, height = struct.unpack(">II", png[16:24])  # of the header that opens every PNG file
            image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
            summary = Summary(value=[Summary.Value(tag=f"{TAG}/{name}", image=image)])
            writer.write(Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())
    return file


def describe(config: ModeConfig, shown: Survey, row: int, position: int) -> str:
    """A token's numbers in words."""
    kept_X = shown.kept_NXL[row, :, position]
    words = [f"{int(kept_X.sum())} of {len(kept_X)} blocks"]
    if config.experts is not None:
        real, no_op = (int(grid[row, :, position].sum()) for grid in (shown.processed_NXL, shown.no_ops_NXL))
        words.append(f"{real} choices of real experts, {no_op} no-ops")
    return "; ".join([*words, f"entropy of the next token {shown.entropy_NL[row, position]:.2f} nats"])
