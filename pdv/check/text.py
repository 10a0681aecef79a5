"""The numbers of an emitted text exchanged for those of the same program at other sizes.

Two emissions of one program at different sizes are the same stream of tokens but for number literals (comments,
docstrings and the layout of lines apart). What is run at small sizes is the text itself, laid out as it is on disk,
with the small numbers in it; what a user changed in it stays changed. Entry point: ``at_sizes``.
"""

from __future__ import annotations

import difflib
import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass

from ir.errors import VerificationError

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_STARTS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_CLOSERS = {")", "]", "}"}


@dataclass(frozen=True)
class Token:
    """A token that means something, and where it is: row (from 1) and column."""

    kind: int
    text: str
    start: tuple[int, int]
    end: tuple[int, int]

    @property
    def is_number(self) -> bool:
        """True for a number literal."""
        return self.kind == tokenize.NUMBER

    @property
    def shape(self) -> str:
        """The token, with numbers alike."""
        return "0" if self.is_number else self.text if self.kind != tokenize.INDENT else "->"


def tokens(text: str) -> list[Token]:
    """The tokens of a module without comments, docstrings, and what only its layout needs.

    Raises:
        VerificationError: if the text is no Python.
    """
    found: list[Token] = []
    start = True
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _LAYOUT:
                continue
            docstring = start and token.type == tokenize.STRING
            start = token.type in _STARTS or docstring
            if docstring:
                continue
            if token.type == tokenize.NEWLINE and (not found or found[-1].kind == tokenize.NEWLINE):
                continue  # of a docstring
            if token.string in _CLOSERS and found and found[-1].text == ",":
                found.pop()  # where a long call was broken
            found.append(Token(token.type, token.string, token.start, token.end))
    except (tokenize.TokenError, SyntaxError) as error:
        raise VerificationError(f"a module of the package is no Python: {error}") from error
    return found


def same_structure(left: Sequence[Token], right: Sequence[Token]) -> bool:
    """Whether two texts are the same but for numbers."""
    return [token.shape for token in left] == [token.shape for token in right]


def at_sizes(text: str, emitted: str, other: str) -> str | None:
    """``text`` with the numbers of ``other`` where it has those of ``emitted``; None if these two part in more.

    text: what is on disk, perhaps edited; emitted: what was emitted; other: the same program at other sizes.

    Raises:
        VerificationError: if the text is no Python.
    """
    if emitted == other:
        return text
    old, new = tokens(emitted), tokens(other)
    if not same_structure(old, new):
        return None
    found = tokens(text) if text != emitted else old
    rows = text.split("\n")
    for token, number in reversed(list(_exchange(found, old, new))):
        row, start, end = token.start[0] - 1, token.start[1], token.end[1]
        rows[row] = rows[row][:start] + number + rows[row][end:]
    return "\n".join(rows)


def _exchange(found: Sequence[Token], old: Sequence[Token], new: Sequence[Token]) -> list[tuple[Token, str]]:
    """Numbers of a text that become others, in order."""
    pairs: list[tuple[int, int]] = []
    if found is old:
        pairs = [(at, at) for at in range(len(old))]
    else:
        left, right = [token.text for token in found], [token.text for token in old]
        matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
        for block in matcher.get_matching_blocks():
            pairs += [(block.a + step, block.b + step) for step in range(block.size)]
    return [(found[a], new[b].text) for a, b in pairs if found[a].is_number and found[a].text != new[b].text]
