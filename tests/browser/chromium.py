"""A headless Chromium, driven by its own protocol (Chrome DevTools) over two pipes: no driver, no network.

Entry point: ``open_page``.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WITHIN_S = 60.0


def find_browser() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page: what it says, what it asks for, and what it is told."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def attach(self) -> None:
        """A tab of its own."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + WITHIN_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._reader, 1 << 20)
            assert more, "the browser is gone"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def run(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """The window, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.settle()

    def settle(self) -> None:
        """Until what was asked to be drawn is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def load(self, path: Path) -> None:
        """Open a file, and wait until it has drawn itself or said why not."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + WITHIN_S
        while not self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
            assert time.monotonic() < until, f"{path} does not load"
            time.sleep(0.05)
        self.settle()

    def picture(self, path: Path, selector: str | None = None, height: float | None = None) -> None:
        """A screenshot, of one element if one is named, of its first ``height`` pixels if that is given."""
        options: dict[str, Any] = {"format": path.suffix.removeprefix(".")}
        if options["format"] == "webp":
            options["quality"] = 82
        if selector is not None:
            box = self.run(
                f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                "return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}; })()"
            )
            if height is not None:
                box["height"] = min(box["height"], height)
            options |= {"clip": {**box, "scale": 1}, "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    @property
    def complaints(self) -> list[str]:
        """Exceptions, errors and warnings on the console, and what the browser logged."""
        self.run("1")
        found = []
        for event in self.events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    details = params["exceptionDetails"]
                    found.append(str(details.get("exception", {}).get("description", details["text"])))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    found.append(str(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    found.append(str(params["entry"]["text"]))
        return found

    @property
    def requests(self) -> list[str]:
        """Everything that was asked for, the files opened by ``load`` and data in the page apart."""
        self.run("1")
        sent = (event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent")
        urls = [one["request"]["url"] for one in sent if one.get("type") != "Document"]
        return [url for url in urls if not url.startswith("data:")]


@contextlib.contextmanager
def open_page(program: str) -> Iterator[Page]:
    """A page of a browser that is ended afterwards."""
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    with tempfile.TemporaryDirectory(prefix="pdv-chromium-", ignore_cleanup_errors=True) as folder:
        options = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars"]
        options += [
            "--disable-background-networking",
            "--disable-component-update",
            "--force-prefers-color-scheme=light",
        ]
        options += [f"--user-data-dir={folder}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        # the browser reads commands from descriptor 3 and writes answers to 4
        command = ["bash", "-c", f'exec "$@" 3<&{from_us} 4>&{to_us}', "bash", program, *options]
        browser = subprocess.Popen(
            command, pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(from_us)
        os.close(to_us)
        try:
            page = Page(from_browser, to_browser)
            page.attach()
            yield page
            with contextlib.suppress(OSError, AssertionError):
                page._session = None
                page.call("Browser.close")
        finally:
            os.close(to_browser)
            os.close(from_browser)
            with contextlib.suppress(subprocess.TimeoutExpired):
                browser.wait(10)
            browser.kill()
            browser.wait()
