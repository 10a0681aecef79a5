"""YAML that is plain data: what else YAML could smuggle in is refused before anything is built. Entry point:
``check_plain``.
"""

from __future__ import annotations

import yaml

from ir.errors import PdvError

MAX_DEPTH = 16


def check_plain(text: str, name: str, error: type[PdvError], wanted: str) -> None:
    """Refuse tags, anchors, aliases (and with them entity bombs) and what is nested deep.

    Looks at the events alone, so that nothing is built yet when an alias would multiply it.

    Args:
        text: what to look at.
        name: of its file.
        error: what to raise.
        wanted: what to do in place of nesting.

    Raises:
        PdvError: ``error``, naming the line.
        yaml.YAMLError: if it is no YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"{name} line {event.start_mark.line + 1}" if event.start_mark else name
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise error(f"{place}: anchors and aliases (& and *) are not allowed", mend="Write the values out")
        tag = getattr(event, "tag", None)
        if tag:
            raise error(f"{place}: tags ({ascii(tag)[:60]}) are not allowed", mend="Remove the tag")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise error(f"{place}: nested more than {MAX_DEPTH} deep", mend=wanted)
