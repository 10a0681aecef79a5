"""Runs the notebooks of the documentation, each in a folder of its own; a cell that raises ends it.

    python -m tools.notebooks

What they print is not kept in the repository. Entry point: ``run``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
TIMEOUT_S = 600  # of one cell


def run(path: Path) -> list[str]:
    """What its cells printed.

    Raises:
        nbclient.exceptions.CellExecutionError: with the traceback of a cell that raised.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": folder}}).execute()
    return [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())]


if __name__ == "__main__":
    assert NOTEBOOKS
    for each in NOTEBOOKS:
        print(f"{each.name}: {len(''.join(run(each)))} characters")
