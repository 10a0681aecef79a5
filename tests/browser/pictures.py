"""The pictures of docs/report.md, taken anew: python -m tests.browser.pictures LARGE.html SMALL.html [FOLDER]

LARGE is the page of a pipeline, SMALL one of a plan without.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.browser.chromium import Page, find_browser, open_page

MOST_BYTES = 150 * 1024
FOLDER = Path("docs/images")
PRODUCT = "[...document.querySelectorAll('.node')].find(n => /^linear · mlp/.test(n.textContent))"


def main(large: str, small: str, folder: str = str(FOLDER)) -> None:
    """Eight of them, each small enough for a page of documentation."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    browser = find_browser()
    assert browser is not None, "a Chromium takes the pictures"
    with open_page(browser) as page:
        _show(page, large)
        page.picture(target / "report-overview.webp")
        page.picture(target / "report-timeline.webp", "#timeline")
        for _ in range(9):
            page.run("document.getElementById('zoom-in').click()")
        page.settle()
        page.picture(target / "report-zoomed.webp", "#timeline", 520)
        page.picture(target / "report-memory.webp", "#memory", 900)
        _show(page, small)
        page.run(f"({PRODUCT}).dispatchEvent(new MouseEvent('click'))")
        page.picture(target / "report-graph.webp", "#graph", 900)
        page.picture(target / "report-experts.webp", "#experts")
        page.picture(target / "report-sensitivity.webp", "#sensitivity")
        page.picture(target / "report-cluster.webp", "#cluster")
        page.run("document.getElementById('theme').click()")
        page.run("scrollTo(0, 0)")
        page.settle()
        page.picture(target / "report-dark.webp")
        page.resize(400, 860)
        page.picture(target / "report-narrow.webp")
    for path in sorted(target.glob("report-*.webp")):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
        assert path.stat().st_size <= MOST_BYTES, path


def _show(page: Page, path: str) -> None:
    page.resize(1280, 900)
    page.load(Path(path))
    assert page.complaints == []


if __name__ == "__main__":
    main(*sys.argv[1:])
