"""What the packages look like from outside: sizes, imports, decisions by operator name; `make structure` prints it.

    python -m tests.structure [--renew] [--list MEASURE]

Every measure has a limit that it is on its way to (`tests/structure.json`: what it was when last recorded, and the
limit). It may fall and not rise: what rises fails `make lint`; `--renew` records what fell, and
draws the imports and the folders in docs/architecture.md anew. Entry points: ``measures``, ``main``.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import networkx as nx

from ir.ops import OPERATORS
from tests.decisions import Tables, decisions, tables_of

ROOT = Path(__file__).parent.parent
PACKAGES = ("ir", "pdv", "learned_cost")
RECORD = Path(__file__).with_name("structure.json")
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MAX_FILES, MAX_LINES = 16, 400
OF_OPERATORS = ("ir.ops", "pdv.frontend")
"""Where operators are told apart by name: their own declarations, and those who read foreign names."""

OF_TORCH = ("pdv.frontend", "pdv.emit", "pdv.check", "pdv.loops")
ANSWERS = ("pdv.problem.solution", "pdv.search.best", "pdv.simulate.result", "pdv.report.loaded", "pdv.plan.package")
"""Where the records of what was found are declared."""

# Layer -> its modules (with all below them), from the lowest to the highest: each imports those before it, and itself.
LAYERS: Mapping[str, tuple[str, ...]] = {
    "ir": ("ir",),
    "learned_cost": ("learned_cost",),
    "files": (
        "pdv.arguments", "pdv.config", "pdv.folders", "pdv.guard", "pdv.own_key", "pdv.programs", "pdv.watch",
        "pdv.plan.seal", "pdv.plan.source",
    ),
    "rewrite": ("pdv.rewrite",),
    "passes": ("pdv.passes",),
    "cluster": ("pdv.cluster",),
    "frontend": ("pdv.frontend",),
    "cost": ("pdv.cost",),
    "problem": ("pdv.problem",),
    "pcg": ("pdv.pcg",),
    "search": ("pdv.search",),
    "pins": ("pdv.pins",),
    "schedule": ("pdv.schedule",),
    "memory": ("pdv.memory",),
    "simulate": ("pdv.simulate",),
    "manual": ("pdv.manual",),
    "emit": ("pdv.emit",),
    "check": ("pdv.check",),
    "page": ("pdv.page",),
    "plan": ("pdv.plan", "pdv.prices"),
    "pipelines": ("pdv.pipelines",),
    "report": ("pdv.report",),
    "verification": ("pdv.verification",),
    "planning": ("pdv.planning", "pdv.launch"),
    "loops": ("pdv.loops",),
    "rivals": ("pdv.rivals",),
    "measure": ("pdv.measure",),
    "compile": ("pdv.compile", "pdv"),
    "cli": ("pdv.cli", "pdv.__main__"),
}  # fmt: skip

Kind = Literal["eager", "lazy", "types"]


@dataclass(frozen=True)
class Module:
    """A file: its dotted name, its text and its tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def where(self) -> str:
        """The path from the root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def lines(self) -> int:
        """How many it has."""
        return self.text.count("\n")

    @property
    def statements(self) -> int:
        """How many it has, docstrings among them."""
        return sum(isinstance(node, ast.stmt) for node in ast.walk(self.tree))


@dataclass(frozen=True)
class Import:
    """One import: of what, in which line, and when it happens (when its module is imported, later, for types only)."""

    name: str
    line: int
    kind: Kind


@cache
def modules() -> Mapping[str, Module]:
    """The modules of the packages, by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            text = path.read_text(encoding="utf-8")
            found[name] = Module(name, path, text, ast.parse(text))
    return found


def imports(tree: ast.AST, kind: Kind = "eager") -> Iterator[Import]:
    """Every import of a module; of ``from a import b`` both ``a`` and ``a.b``, which may be a module too."""
    for node in ast.iter_child_nodes(tree):
        inner: Kind = kind
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and kind == "eager":
            inner = "lazy"
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inner = "types"
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, kind) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield Import(node.module, node.lineno, kind)
            yield from (Import(f"{node.module}.{alias.name}", node.lineno, kind) for alias in node.names)
        yield from imports(node, inner)


@cache
def import_graph() -> nx.DiGraph:
    """Module -> module of ours that it imports, however; from a package, the module that is meant."""
    graph: nx.DiGraph = nx.DiGraph()
    known = modules()
    for module in known.values():
        found = [entry for entry in imports(module.tree) if entry.name in known and entry.name != module.name]
        finer = {(entry.line, entry.name.rpartition(".")[0]) for entry in found}
        for entry in found:
            if (entry.line, entry.name) not in finer:
                graph.add_edge(module.name, entry.name, line=entry.line, kind=entry.kind)
    return graph


def layer_of(module: str) -> str:
    """The layer of a module.

    Raises:
        LookupError: if it has none.
    """
    under = {root: layer for layer, roots in LAYERS.items() for root in roots}
    while module and module not in under:
        module = module.rpartition(".")[0]
    return under[module]


def diagram() -> str:
    """The layers and who imports whom, as mermaid: dashed where upwards; arrows that follow from others left out."""
    order = list(LAYERS)
    used = {(layer_of(a), layer_of(b)) for a, b, data in import_graph().edges(data=True) if data["kind"] != "types"}
    pairs = sorted(used, key=lambda pair: [order.index(layer) for layer in pair])
    reduced = nx.transitive_reduction(nx.DiGraph((a, b) for a, b in pairs if order.index(a) > order.index(b)))
    arrows = [f"    {a} --> {b}" for a, b in pairs if reduced.has_edge(a, b)]
    arrows += [f"    {a} -.-> {b}" for a, b in pairs if order.index(a) < order.index(b)]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```"])


def tree() -> str:
    """The folders of the packages, each with the first sentence of its docstring."""
    lines = []
    for module in modules().values():
        if module.path.name == "__init__.py":
            depth = module.name.count(".")
            name = "  " * depth + module.name.rpartition(".")[2] + "/"
            first = (ast.get_docstring(module.tree) or "").split("\n")[0]
            lines.append(f"{name:<16}{first.split('. ')[0].removesuffix('.')}")
    return "\n".join(["```text", *lines, "```"])


def drawn(page: str, kind: str = "mermaid") -> str:
    """The diagram of a page, or its tree of folders (``text``), as it stands there."""
    start = page.index(f"```{kind}")
    return page[start : page.index("```", start + 3) + 3]


def full_folders() -> list[str]:
    """Folders of more than sixteen files."""
    counts = Counter(module.path.parent.relative_to(ROOT).as_posix() for module in modules().values())
    return [f"{folder}: {count} files" for folder, count in sorted(counts.items()) if count > MAX_FILES]


def long_files() -> list[str]:
    """Files of more than 400 lines."""
    return [f"{module.where}: {module.lines} lines" for module in modules().values() if module.lines > MAX_LINES]


def circles() -> list[str]:
    """Modules that import each other, be it late or for types alone."""
    found = [sorted(group) for group in nx.strongly_connected_components(import_graph()) if len(group) > 1]
    return [", ".join(group) for group in sorted(found)]


def upward_imports() -> list[str]:
    """Imports from a higher layer, be it late or for types alone."""
    order = list(LAYERS)
    return [
        f"{modules()[user].where}:{data['line']}: {used} ({data['kind']})"
        for user, used, data in sorted(import_graph().edges(data=True))
        if order.index(layer_of(used)) > order.index(layer_of(user))
    ]


def hidden_channels() -> list[str]:
    """What one part tells another behind its values.

    A field of an error that is set after it is made, a function among the fields of an answer, and a table that knows
    its entries by where they lie in memory (``id``; where torch is, it tells tensors apart).
    """
    found: list[str] = []
    for module in modules().values():
        lines = [*changed_errors(module.tree)]
        if module.name in ANSWERS:
            lines += functions_held(module.tree)
        if not module.name.startswith(OF_TORCH):
            lines += identities(module.tree)
        found += [f"{module.where}:{line}" for line in sorted(lines)]
    return found


def changed_errors(tree: ast.Module) -> Iterator[int]:
    """Lines where an attribute of an error is assigned: of one that was caught, is an argument, or was made here."""
    for scope in ast.walk(tree):
        nodes = list(ast.walk(scope)) if isinstance(scope, ast.FunctionDef) else []
        errors = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)}
        errors |= {node.arg for node in nodes if isinstance(node, ast.arg) and _is_error(node.annotation)}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_error(node.value.func):
                errors |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield from [node.lineno] * (isinstance(node.value, ast.Name) and node.value.id in errors)


def _is_error(name: ast.expr | None) -> bool:
    return name is not None and ast.unparse(name).endswith(("Error", "Exception"))


def functions_held(tree: ast.Module) -> Iterator[int]:
    """Lines of fields that are functions."""
    for node in ast.walk(tree):
        fields = node.body if isinstance(node, ast.ClassDef) else []
        for field in (entry for entry in fields if isinstance(entry, ast.AnnAssign)):
            if "Callable" in ast.unparse(field.annotation):
                yield field.lineno


def identities(tree: ast.Module) -> Iterator[int]:
    """Lines where ``id`` is asked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id":
            yield node.lineno


@cache
def _deciding() -> tuple[list[str], list[str]]:
    known, names = modules(), frozenset(OPERATORS)
    tables = Tables.of({name: module.tree for name, module in known.items()}, names)
    taken: list[str] = []
    told: list[str] = []
    for name, module in known.items():
        if not name.startswith(OF_OPERATORS):
            for into, entries in (
                (taken, decisions(module.tree, names, tables.names[name])),
                (told, tables_of(module.tree, names)),
            ):
                into += [f"{module.where}:{entry.line}: {entry.text[:100]}" for entry in entries]
    return taken, told


def measures() -> dict[str, list[str]]:
    """What is counted, by name: where it is."""
    taken, told = _deciding()
    return {
        "folders of more than 16 files": full_folders(),
        "files of more than 400 lines": long_files(),
        "import circles": circles(),
        "upward imports": upward_imports(),
        "hidden channels": hidden_channels(),
        "decisions by operator name": taken,
        "tables of operator names": told,
    }


def statements() -> int:
    """Statements of the packages, by `ast`."""
    return sum(module.statements for module in modules().values())


def record() -> dict[str, dict[str, int]]:
    """What was recorded: of each measure ``now`` and its ``target``; of the statements what they were at the start."""
    return json.loads(RECORD.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def grown(found: Mapping[str, Sequence[str]], recorded: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Measures that are above what was recorded, in words."""
    return [
        f"{name}: {len(places)}, were {recorded[name]['now']} (target {recorded[name]['target']})"
        for name, places in found.items()
        if len(places) > recorded[name]["now"]
    ]


def fallen(found: Mapping[str, Sequence[str]], recorded: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """The record with lower counts where there are any; none that is higher."""
    return {
        name: {**entry, "now": min(entry["now"], len(found[name]))} if name in found else dict(entry)
        for name, entry in recorded.items()
    }


def main() -> None:
    """Print the folders and the measures; fail if one has grown."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--renew", action="store_true", help="record counts that have fallen")
    parser.add_argument("--list", metavar="MEASURE", help="say where what a measure counts is")
    options = parser.parse_args()
    found, recorded = measures(), record()
    if options.list:
        print(*(line for name, places in found.items() if options.list in name for line in places), sep="\n")
        return
    print_folders()
    for name, places in found.items():
        print(f"{name:<32}{len(places):>6}   recorded {recorded[name]['now']}, target {recorded[name]['target']}")
    start, target = recorded["statements"]["start"], recorded["statements"]["target"]
    print(f"{'statements':<32}{statements():>6}   at the start {start}, target {target}")
    if options.renew:
        RECORD.write_text(json.dumps(fallen(found, recorded), indent=2) + "\n", encoding="utf-8")
        page = ARCHITECTURE.read_text(encoding="utf-8")
        page = page.replace(drawn(page), diagram()).replace(drawn(page, "text"), tree())
        ARCHITECTURE.write_text(page, encoding="utf-8")
    elif fallen(found, recorded) != recorded:
        print("counts have fallen: record that with python -m tests.structure --renew")
    if risen := grown(found, recorded):
        sys.exit("\n".join(["risen: say what an operator does where it is declared, import downwards", *risen]))


def print_folders() -> None:
    """One line a folder: files, its longest file, lines, statements."""
    folders: dict[str, list[Module]] = {}
    for module in modules().values():
        folders.setdefault(module.path.parent.relative_to(ROOT).as_posix(), []).append(module)
    print(f"{'folder':<32}{'files':>6}{'longest':>9}{'lines':>8}{'statements':>12}")
    for folder, inside in sorted(folders.items()):
        lines = [module.lines for module in inside]
        total = sum(module.statements for module in inside)
        print(f"{folder:<32}{len(inside):>6}{max(lines):>9}{sum(lines):>8}{total:>12}")


if __name__ == "__main__":
    main()
