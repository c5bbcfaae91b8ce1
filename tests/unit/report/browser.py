"""Headless Chromium, driven over its DevTools protocol: no more than what the tests of the pages ask of it.

A driver package would bring a browser or a binary of its own; the protocol is JSON over a web socket, and
``websockets`` is installed with vLLM's server.
"""

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "Debian's package chromium is not installed: the pages are not opened in a browser"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0"),
)
LIMIT_S = 60.0
WATCHED = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.requestWillBeSent")


class Tab:
    """One page. ``complaints`` is what its console said, ``requests`` are the addresses that it asked for."""

    def __init__(self, socket: ClientConnection, downloads: Path) -> None:
        self._socket, self._number = socket, 0
        self.downloads = downloads
        self.complaints: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=LIMIT_S))
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method in WATCHED:
            self.complaints.append(json.dumps(params)[:500])

    def open(self, file: Path) -> None:
        self.call("Page.navigate", url=file.absolute().as_uri())
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition} did not come true within {limit_s} s"
            time.sleep(0.02)

    def resize(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **({"text": key} if len(key) == 1 else {}))

    def click(self, selector: str) -> None:
        """A real one, at the middle of what is there, so that a button under another thing is not pressed."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({selector!r});"
            " e.scrollIntoView({block: 'center', behavior: 'instant'});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)


def _port(process: "subprocess.Popen[str]") -> int:
    """Where the browser listens; one that ends before it listens has said why."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if match := re.search(r"ws://[^:]+:(\d+)/", line):
            return int(match[1])
    raise AssertionError(f"{CHROMIUM} ended with {process.wait(timeout=LIMIT_S)}: {''.join(said)}")


@contextmanager
def tab() -> Iterator[Tab]:
    """A browser with an empty profile and one page."""
    assert CHROMIUM is not None, MISSING
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={directory}/profile", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            connection = HTTPConnection("127.0.0.1", _port(process), timeout=LIMIT_S)
            connection.request("GET", "/json/list")
            pages = json.loads(connection.getresponse().read())
            address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            with connect(address, max_size=None, open_timeout=LIMIT_S) as socket:
                yield Tab(socket, Path(directory) / "downloads")
        finally:
            process.terminate()
            process.wait(timeout=LIMIT_S)


# What a page is asked once it is open.
LOADED = """(async () => {
  const found = {};
  for (const name of Object.keys(clips)) {
    const one = new Audio(urlOf(name));
    found[name] = await new Promise((done) => {
      one.addEventListener('loadedmetadata', () => done(one.duration));
      one.addEventListener('error', () => done(null));
    });
  }
  return found;
})()"""
OVERFLOWING = """(() => {
  const width = document.documentElement.clientWidth;
  return [...document.querySelectorAll('body *')]
    .filter((e) => !e.closest('.scroll') && e.getBoundingClientRect().right > width + 1)
    .map((e) => e.outerHTML.slice(0, 120));
})()"""
UNLABELLED = """[...document.querySelectorAll('button, input, textarea, [tabindex], svg[role=img]')]
  .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map((e) => e.outerHTML.slice(0, 120))"""
