"""Trains a MoE, MoD or MoDE language model on DeepSpeed.

    deepspeed train.py --deepspeed_config ds_configs/mode.json

Also runs as `python train.py ...`, as a single process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from mode.host import keep_freed_memory, share_the_cores
from mode.tooling import add_set_option
from mode.training.safety.stop_signal import EXIT_INTERRUPTED, StopSignal, ignore_stop_signals


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--deepspeed_config",
        required=True,
        metavar="FILE",
        help='a DeepSpeed JSON file with a "mode" section; see ds_configs/',
    )
    parser.add_argument(
        "--output_dir",
        metavar="DIR",
        help="where the run's config, metrics, TensorBoard events and checkpoints go (default: runs/<job name>, "
        "the job name being tensorboard.job_name or the config file's name)",
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto: continue from the newest whole checkpoint of the output directory, if there is one (default); "
        "never: start afresh, replacing what is there; PATH: a checkpoint, or another run's directory",
    )
    add_set_option(parser)
    parser.add_argument(
        "--extend",
        action="store_true",
        help="go on with a run whose length, optimizer settings or schedule are no longer those it was saved with: "
        "schedules are planned anew, and the run keeps a record of it",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="print the resolved config, the plan and the layout; exit"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher passes it
    return parser.parse_args(arguments)


def main(command_line: list[str] | None = None) -> int:
    arguments = parse_arguments(command_line)
    stop_signal = StopSignal()
    share_the_cores()
    keep_freed_memory()
    from mode.config.file import load_run_config
    from mode.config.section import ConfigError

    try:
        run = load_run_config(arguments.deepspeed_config, arguments.set)
    except ConfigError as error:
        return fail(str(error), 2)

    from mode.data import DamagedCache, DataError, prepare_data
    from mode.training.logging.console import plan_table
    from mode.training.loop.engine import engine_settings, process_group
    from mode.training.loop.trainer import Trainer
    from mode.training.safety import stops
    from mode.training.safety.watchdog import Watchdog

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    job_name = run.deepspeed.get("tensorboard", {}).get("job_name") or Path(arguments.deepspeed_config).stem
    run_dir = Path(arguments.output_dir or Path("runs") / job_name)
    try:
        settings = engine_settings(run, world_size)  # refuses wrong ones before the data are prepared
        if arguments.dry_run:
            if rank == 0:
                resolved = {**settings, "mode": run.mode.to_dict()}
                print(json.dumps(resolved, indent=2) + "\n\n" + plan_table(run, world_size))
            return 0
        data = prepare_data(run.mode, quiet=rank != 0)
        limit = run.mode.train.watchdog_seconds if world_size > 1 else None  # alone, a rank waits for nobody
        stop_signal.defer()
        with Watchdog(limit, rank) as watchdog, process_group(watchdog):
            interrupted = Trainer(run, data, run_dir, arguments.resume, watchdog, stop_signal, arguments.extend).train()
    except DamagedCache as error:  # found by the rank that read it, in the middle of the run
        return fail(f"rank {rank}: {error}", stops.EXIT_SAVE_FAILED, every_rank=True)
    except (ConfigError, DataError) as error:
        return fail(str(error), stops.EXIT_BAD_INPUT)
    except stops.NotFinite as error:
        return fail(str(error), stops.EXIT_NOT_FINITE)
    except stops.SaveFailed as error:
        return fail(f"rank {rank}: {error}", stops.EXIT_SAVE_FAILED, every_rank=True)
    except OSError as error:
        return fail(f"rank {rank}: reading or writing failed: {error}", stops.EXIT_SAVE_FAILED, every_rank=True)
    return EXIT_INTERRUPTED if interrupted or stop_signal.received else 0


def fail(message: str, code: int, every_rank: bool = False) -> int:
    """What stops one rank usually stops all, so one per machine says so."""
    if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    exit_code = main()
    ignore_stop_signals()
    sys.exit(exit_code)
