"""Why a backend cannot be used on this machine or for this model."""

from __future__ import annotations

from mode.section import ConfigError


class Lack(ConfigError):
    """An error where the backend was named; `auto` takes another and gives the reason."""

    def __init__(self, backend: str, reason: str, fix: str) -> None:
        self.reason = reason
        super().__init__("experts.backend", f'is "{backend}"; {reason}; {fix}')
