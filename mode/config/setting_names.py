"""Refuses settings that neither DeepSpeed nor `mode` reads, and names the nearest that is read.

Names only: `mode.config.section` checks the values of ours, `mode.training.safety.deepspeed_check` has DeepSpeed judge
its own.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

from mode.config.deepspeed_settings import SETTINGS
from mode.config.section import ConfigError, Section, nearest
from mode.config.settings import ModeConfig


def check_names(document: dict[str, Any]) -> None:
    """Every key of a file beside "mode", and of DeepSpeed's sections; `ModeConfig` checks those in "mode"."""
    for key, value in document.items():
        check_name((key,), document)
        for name in value if isinstance(value, dict) else ():
            check_name((key, name), document)


def check_name(keys: tuple[str, ...], document: dict[str, Any]) -> None:
    """The path of one setting, key by key. `document` is the file it is for."""
    if _is_read(keys):
        return
    key, *rest = keys
    known = _known_paths(document)
    if key in SETTINGS:
        deeper = [path for path in known if path.startswith(f"{key}.") and path.endswith(f".{rest[0]}")]
        valid = f'did you mean "{deeper[0]}"?' if deeper else nearest(rest[0], SETTINGS[key])
        raise ConfigError(f"{key}.{rest[0]}", f"unknown key; {valid}")
    near = _nearest_paths(".".join(keys), known)
    valid = f"did you mean {near}?" if near else f"valid keys: mode, {', '.join(SETTINGS)}"
    raise ConfigError(".".join(keys) or '""', f"unknown key, which DeepSpeed would ignore; {valid}")


def _is_read(keys: tuple[str, ...]) -> bool:
    if keys[0] == "mode":
        return True
    return keys[0] in SETTINGS and (len(keys) == 1 or not SETTINGS[keys[0]] or keys[1] in SETTINGS[keys[0]])


def _known_paths(document: dict[str, Any]) -> list[str]:
    """Every setting that can be named: ours, DeepSpeed's, and those further down in the file: optimizer.params.lr."""
    paths = [("mode",), *((key,) for key in SETTINGS), *_paths_of_section(ModeConfig, ("mode",))]
    paths += [(key, name) for key, names in SETTINGS.items() for name in names]
    paths += [keys for keys in _paths_of_file(document) if keys[0] != "mode" and _is_read(keys)]
    return list(dict.fromkeys(".".join(keys) for keys in paths))


def _paths_of_section(section: type[Section], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for field in dataclasses.fields(section):
        yield (*above, field.name)
        inner = field.metadata["rule"].section
        if inner is not None:
            yield from _paths_of_section(inner, (*above, field.name))


def _paths_of_file(part: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in part.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _paths_of_file(value, (*above, key))


def _nearest_paths(path: str, known: list[str]) -> str:
    """Up to three of `known`: those that end like `path`, or else those whose last name is spelt like its."""
    found = [each for each in known if each.endswith(f".{path}") or each == path]
    if not found:
        first, last = (part.lower() for part in (path.split(".")[0], path.split(".")[-1]))
        found = difflib.get_close_matches(first, [each for each in known if "." not in each], n=1, cutoff=0.75)
        names = [each.rpartition(".")[2] for each in known]
        spelt_alike = difflib.get_close_matches(last, names, n=1, cutoff=0.75)
        found = found or [each for each in known if each.rpartition(".")[2] in spelt_alike]
    ours_first = sorted(found, key=lambda each: (not each.startswith("mode."), each.count(".")))
    return " or ".join(f'"{each}"' for each in ours_first[:3])
