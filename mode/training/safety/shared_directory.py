"""Checks that all ranks see one run directory and read one corpus.

A checkpoint is written by all ranks into one folder. On nodes that each have a folder of that name, the run
would look healthy, and its checkpoints would lack what the other nodes wrote. Likewise a rank with other tokens
would train on without a word.

Knows nothing of what is kept in the directory, or of what the corpus is.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from torch import distributed

from mode.config.section import ConfigError

PATIENCE = 10.0  # seconds that a network file system may take to show a new file


def check_shared(run_dir: Path) -> None:
    """Refuses a directory in which some rank cannot see what rank 0 writes. A collective."""
    rank = distributed.get_rank()
    names = [f".shared-{uuid.uuid4().hex}"]
    if rank == 0:
        (run_dir / names[0]).touch()
    distributed.broadcast_object_list(names)
    marker = run_dir / names[0]
    seen: list[bool] = [False] * distributed.get_world_size()
    distributed.all_gather_object(seen, _appears(marker))
    if rank == 0:
        marker.unlink()
    blind = [number for number, sees in enumerate(seen) if not sees]
    if blind:
        raise ConfigError(
            "--output_dir",
            f"{run_dir} is not one folder for all ranks: what rank 0 writes there, ranks {blind} do not see; name a "
            "folder on a file system that all nodes share",
        )


def check_same_corpus(digest: str, folder: Path) -> None:
    """Refuses packed data that is not the same on all ranks; `folder` is this rank's cache. A collective."""
    mine = (digest, str(folder))
    seen: list[tuple[str, str]] = [mine] * distributed.get_world_size()
    distributed.all_gather_object(seen, mine)
    others = [rank for rank, (other, _) in enumerate(seen) if other != seen[0][0]]
    if others:
        raise ConfigError(
            "mode.data",
            f"the corpus is not the same on all ranks: ranks {others} have other tokens or another tokenizer than rank "
            f"0 (rank 0: {seen[0][1]}, rank {others[0]}: {seen[others[0]][1]}); set mode.data.cache_dir to a folder "
            "that all nodes share, or give every node the same files",
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
