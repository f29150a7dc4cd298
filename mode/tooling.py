"""How a command-line tool ends: its figures as text or JSON, or one line that says what was wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def print_figures(make: Callable[[], dict[str, Any]], render: Callable[[dict[str, Any]], str], as_json: bool) -> int:
    """The exit code: 0, 2 for wrong input, 4 where reading or writing failed."""
    from mode.data import DataError
    from mode.section import ConfigError

    try:
        figures = make()
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: reading or writing failed: {error}", file=sys.stderr)
        return 4
    print(json.dumps(figures, indent=2) if as_json else render(figures))
    return 0
