"""One file from facts: markup, style, scripts and data, which loads nothing and runs nothing but itself.

Data lies in a block that no browser runs, with every `<` written as an escape, and scripts write it as text, so that no
name of a user's becomes markup; a policy in the page names its one script and its one style by their digests, and
forbids all else, requests among it. Entry point: ``write_page``.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

REPORT = "report.html"
FACTS_VERSION = 1
SCRIPTS = ("basics", "overview", "timeline", "memory", "layout", "graph", "tables", "cluster", "main")
POLICY = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
PLACE = re.compile(r"\{\{(\w+)\}\}")
LEFT_OUT = ("weights", "files", "checksum", "laws", "state")
"""Fields of plan.json that the page does not tell."""


def write_page(document: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The page of a plan.json, with what was drawn of its step; equal ones give equal bytes."""
    told = {name: value for name, value in document.items() if name not in LEFT_OUT}
    told["derivation"] = [step for step in document["derivation"] if step["kind"] != "parallel"]  # in `operators`
    drawn = {node.get("number") for section in facts["graph"] for node in section["nodes"]}
    told["operators"] = [entry for entry in document["operators"] if entry["number"] in drawn]  # one of equal layers
    script = "\n".join(["'use strict';", "(() => {", *(_asset(f"{name}.js") for name in SCRIPTS), "})();"])
    style = _asset("style.css")
    parts = {
        "policy": f"{POLICY}; script-src {_digest(script)}; style-src {_digest(style)}",
        "title": html.escape(f"{document['source']['name']} on {document['cluster']['name']}"),
        "style": style,
        "data": _data({"version": FACTS_VERSION, "plan": told, **facts}),
        "script": script,
    }
    return PLACE.sub(lambda place: parts[place[1]], _asset("page.html"))  # at once: no part is looked at for places


def _asset(name: str) -> str:
    return (resources.files("pdv.page.assets") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """As a content security policy names a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(content: Mapping[str, Any]) -> str:
    """JSON that can end no element, and is ASCII."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
