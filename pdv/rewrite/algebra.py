"""The algebraic rules that the search uses by default: every law of the library, in both directions."""

from __future__ import annotations

from pdv.rewrite.library import all_rules

RULES = all_rules()
