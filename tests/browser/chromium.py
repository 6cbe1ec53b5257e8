# SPDX-License-Identifier: Apache-2.0
"""A page in a real browser: Chromium, spoken to through a pipe.

The Chrome DevTools Protocol over --remote-debugging-pipe: JSON messages that end in a zero byte, to
descriptor 3 and from descriptor 4 (https://chromedevtools.github.io/devtools-protocol/). It needs
neither a port nor a library.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import support

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# A crowded machine takes seconds to start it.
_TIMEOUT_S = 60

# Keys to which the browser itself does something, only if it knows their code; and what they type.
_ACTING_KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " ")}

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run"
    " --disable-dev-shm-usage --window-size=1200,900 --remote-debugging-pipe"
)


class Page:
    """One page that is open."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd = write_fd
        self._read_fd = read_fd
        self._pending = b""
        self._serial = 0
        self._session: dict[str, str] = {}
        # What the page has complained about since it was opened: exceptions, errors of the console,
        # and what its content security policy forbade.
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.call("Runtime.enable")
        self.call("Log.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Calls a method of the protocol; returns its result."""
        self._serial += 1
        message = {"id": self._serial, "method": method, "params": params, **self._session}
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            self._note(answer)
            if answer.get("id") == self._serial:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._pending:
            readable, _, _ = select.select([self._read_fd], [], [], deadline_s - time.monotonic())
            assert readable, "the browser does not answer"
            chunk = os.read(self._read_fd, 1 << 16)
            assert chunk, "the browser has ended"
            self._pending += chunk
        text, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        event, told = message.get("method"), message.get("params", {})
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.complaints.append(told["entry"]["text"])

    def value(self, expression: str) -> Any:
        """Evaluates JavaScript in the page; of a promise, what it comes to."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, file: Path, address: str = "", drawn: str = "Boolean(window.aiflame)") -> None:
        """Opens a report anew, and waits until it is drawn: until an expression is true."""
        self.call("Page.navigate", url="about:blank")
        self.complaints.clear()
        self.call("Page.navigate", url=f"{file.resolve().as_uri()}{address}")
        support.wait_until(lambda: self.value(drawn), _TIMEOUT_S)

    def resize(self, width: int, height: int = 900) -> None:
        """Gives the window a size in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Asks pages for "light" or "dark" colours."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, file: Path) -> None:
        """Keeps what the window shows as a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def settle(self) -> None:
        """Waits until what was changed before has been painted: events of the mouse go by that."""
        self.value("new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def click(self, x: float, y: float) -> None:
        """Clicks with the left button."""
        self.settle()
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def type(self, text: str) -> None:
        """Types text to where the focus is."""
        self.call("Input.insertText", text=text)

    def text(self, identity: str) -> str:
        """Returns the text of an element."""
        found: str = self.value(f"document.getElementById('{identity}').textContent")
        return found

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """Sends mousePressed, mouseMoved or mouseReleased with the left button."""
        self.call(
            "Input.dispatchMouseEvent",
            **{"type": kind, "x": x, "y": y, "clickCount": clicks},
            button="left",
            buttons=0 if kind == "mouseReleased" else 1,
        )

    def press(self, key: str, shift: bool = False, control: bool = False) -> None:
        """Presses a key."""
        modifiers = 8 * shift + 2 * control
        code, text = _ACTING_KEYS.get(key, (0, ""))
        more = {"windowsVirtualKeyCode": code} if code else {}
        typed = {"text": text} if text else {}
        for kind, said in (("keyDown" if text else "rawKeyDown", typed), ("keyUp", {})):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers, **more, **said
            )


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Runs a browser with a page, its own files in `profile`."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = f"exec {CHROMIUM} {_FLAGS} --user-data-dir={profile} 3<&{theirs_in} 4>&{theirs_out}"
    process = subprocess.Popen(
        ["bash", "-c", command],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_out, ours_in)
    finally:
        os.close(ours_out)  # it ends with its pipe
        os.close(ours_in)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
