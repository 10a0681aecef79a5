"""Where this program keeps things of its user: what may be lost (caches, reports), and what may not (a key).

Beside it, what names of files say in texts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def text_of(name: str) -> str:
    """What a file's name says where it becomes part of a text, which is UTF-8 whatever the name's bytes are."""
    return os.fsencode(name).decode("utf-8", "replace")


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """$XDG_CACHE_HOME/pdv, else ~/.cache/pdv; None for a user without a home."""
    return _folder(environment, "XDG_CACHE_HOME", ".cache")


def state_folder(environment: Mapping[str, str]) -> Path | None:
    """$XDG_STATE_HOME/pdv, else ~/.local/state/pdv; None for a user without a home."""
    return _folder(environment, "XDG_STATE_HOME", ".local/state")


def _folder(environment: Mapping[str, str], variable: str, usual: str) -> Path | None:
    given = environment.get(variable, "")
    if Path(given).is_absolute():
        return Path(given) / "pdv"
    try:
        home = Path.home() if environment.get("HOME", "/") else Path()
    except RuntimeError:  # no $HOME, and a user whom the system does not know
        return None
    return home / usual / "pdv" if home.is_absolute() else None  # else it would be wherever this program is started
