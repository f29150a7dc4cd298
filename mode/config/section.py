"""What a section of a configuration is: a frozen dataclass whose every field has a rule.

A section object that exists is valid: every check runs when it is built, whether from JSON or in
Python, and a bad value is a `ConfigError` that names the JSON path, the value, what is legal and the
nearest valid name.

Knows nothing of what the settings mean, and imports the standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

MAX_INTEGER = 2**53  # the largest range in which a JSON number is an exact integer everywhere


class InputError(ValueError):
    """Something that the user gave is wrong: the message says what it is, and what to do."""


class ConfigError(InputError):
    """A setting is wrong. `path` is where in the JSON, `problem` what is wrong and what is legal."""

    def __init__(self, path: str, problem: str, file: str = "") -> None:
        self.path, self.problem, self.file = path, problem, file
        shown = path if path.isprintable() and len(path) <= 200 else show(path)
        super().__init__(f"{file}: {shown}: {problem}" if file else f"{shown}: {problem}")

    def under(self, parent: str) -> ConfigError:
        """The same error seen from one level up."""
        return ConfigError(f"{parent}.{self.path}" if self.path else parent, self.problem, self.file)

    def in_file(self, file: str) -> ConfigError:
        return ConfigError(self.path, self.problem, file)


# ---------------------------------------------------------------------------------------------------
# Rules: what one value may be


@dataclass(frozen=True)
class Rule:
    """Says what is legal and turns a JSON value into the stored one, or raises `ConfigError`."""

    legal: str
    accept: Callable[[Any], Any]  # returns the stored value; raises _Illegal
    null: bool = False
    section: type[Section] | None = None

    def read(self, value: Any, path: str) -> Any:
        if value is None and self.null:
            return None
        try:
            return self.accept(value)
        except _Illegal:
            legal = f"{self.legal}, or null" if self.null else self.legal
            raise ConfigError(path, f"is {show(value)}; it must be {legal}") from None
        except ConfigError as error:
            raise error.under(path) from None


class _Illegal(Exception):
    pass


def show(value: Any) -> str:
    """A value as a reader of the JSON file would recognise it, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _field(rule: Rule, default: Any) -> Any:
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata={"rule": rule})
    return dataclasses.field(default=default, metadata={"rule": rule})


def integer(default: Any = dataclasses.MISSING, *, low: int = 1, high: int = MAX_INTEGER, null: bool = False) -> Any:
    def accept(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _Illegal
        return value

    limit = f" and at most {high}" if high != MAX_INTEGER else ""
    return _field(Rule(f"a whole number of at least {low}{limit}", accept, null), default)


def number(
    default: Any = dataclasses.MISSING,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    null: bool = False,
) -> Any:
    def accept(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Illegal
        try:
            stored = float(value)
        except OverflowError:
            raise _Illegal from None
        inside = (
            math.isfinite(stored)
            and (above is None or stored > above)
            and (at_least is None or stored >= at_least)
            and (below is None or stored < below)
            and (at_most is None or stored <= at_most)
        )
        if not inside:
            raise _Illegal
        return stored

    bounds = [("above", above), ("at least", at_least), ("below", below), ("at most", at_most)]
    limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    return _field(Rule(f"a number {limits}".rstrip(), accept, null), default)


def choice(default: Any = dataclasses.MISSING, *, of: tuple[str, ...], null: bool = False) -> Any:
    legal = "one of " + ", ".join(f'"{option}"' for option in of)

    def accept(value: Any) -> str:
        if isinstance(value, str) and value in of:
            return value
        near = difflib.get_close_matches(value, of, n=1) if isinstance(value, str) else []
        if near:
            raise ConfigError("", f'is "{value}"; it must be {legal}; did you mean "{near[0]}"?')
        raise _Illegal

    return _field(Rule(legal, accept, null), default)


def text(default: Any = dataclasses.MISSING, *, null: bool = False) -> Any:
    def accept(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise _Illegal
        return value

    return _field(Rule("a non-empty string", accept, null), default)


def texts(default: Any = dataclasses.MISSING) -> Any:
    def accept(value: Any) -> tuple[str, ...]:
        value = (value,) if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not value:
            raise _Illegal
        if not all(isinstance(item, str) and item.strip() for item in value):
            raise _Illegal
        return tuple(value)

    return _field(Rule("a non-empty string, or a non-empty list of them", accept), default)


def flag(default: Any = dataclasses.MISSING) -> Any:
    def accept(value: Any) -> bool:
        if not isinstance(value, bool):
            raise _Illegal
        return value

    return _field(Rule("true or false", accept), default)


def section(cls: type[Section], default: Any = dataclasses.MISSING, *, null: bool = False) -> Any:
    def accept(value: Any) -> Section:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _Illegal
        return cls.from_dict(value)

    return _field(Rule("a JSON object", accept, null, cls), default)


@dataclass(frozen=True)
class Section:
    """A part of the configuration. Building one checks every field, then the fields together."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            rule = field.metadata["rule"]
            object.__setattr__(self, field.name, rule.read(getattr(self, field.name), field.name))
        self.check()

    def check(self) -> None:
        """What no single field can tell. Overridden where fields must agree."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from JSON. Unknown and missing keys are errors."""
        if not isinstance(values, Mapping):
            raise ConfigError("mode", f"is {show(values)}; it must be a JSON object")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key in values:
            if key not in fields:
                raise ConfigError(str(key), f"unknown key; {nearest(str(key), list(fields))}")
        for name, field in fields.items():
            if name not in values and field.default is dataclasses.MISSING:
                raise ConfigError(name, f"is missing; it must be {field.metadata['rule'].legal}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives the same section back."""
        return cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(self))))


def nearest(key: str, names: Sequence[str]) -> str:
    """The valid names in words, the one spelt like `key` first."""
    near = difflib.get_close_matches(key, names, n=1)
    known = ", ".join(sorted(names))
    return f'did you mean "{near[0]}"? Valid keys: {known}' if near else f"valid keys: {known}"
