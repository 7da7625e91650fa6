"""Headless Chromium driven through its DevTools pipe: real key presses, without a driver or a port."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--window-size=1600,900",
)  # fmt: skip
CODES = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowUp": 38, "ArrowDown": 40}
TEXTS = {"Enter": "\r", " ": " "}
DEADLINE_S = 60.0


class Page:
    """One page in a browser of its own. A context manager: the browser ends with it."""

    def __init__(self, path: Path, profile: Path) -> None:
        self._last_id, self._session, self._rest = 0, "", b""
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def connect() -> None:  # in the child: Chromium reads descriptor 3 and writes descriptor 4
            os.dup2(to_browser, 10)
            os.dup2(from_browser, 11)
            os.dup2(10, 3)
            os.dup2(11, 4)

        self._process = subprocess.Popen(
            [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=connect, close_fds=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        target = self.call("Target.createTarget", url=path.as_uri())["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        deadline = time.monotonic() + DEADLINE_S
        while not self.evaluate(f"location.href === {json.dumps(path.as_uri())} && document.readyState === 'complete'"):
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while True:
            while b"\0" in self._rest:
                text, _, self._rest = self._rest.partition(b"\0")
                answer = json.loads(text)
                if answer.get("id") == self._last_id:
                    assert "error" not in answer, answer
                    return dict(answer["result"])
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer of the browser to {method}"
            self._rest += os.read(self._read, 1 << 20)

    def press(self, *keys: str) -> None:
        """Press and release keys, one after the other."""
        for key in keys:
            about = {"key": key, "windowsVirtualKeyCode": CODES.get(key, ord(key[0].upper())), "code": key}
            text = TEXTS.get(key) or (key if len(key) == 1 else "")
            self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **about)
            self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> Path:
        """Write what the page shows as PNG."""
        import base64

        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
        return path
