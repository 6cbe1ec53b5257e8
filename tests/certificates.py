# SPDX-License-Identifier: Apache-2.0
"""Certificates that stand for themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(folder: Path, passphrase: str = "") -> tuple[Path, Path]:
    """Makes one of 127.0.0.1, and its key; returns their files.

    Args:
        folder: Where; it is made where it is not there.
        passphrase: Of the key, "" for none.
    """
    folder.mkdir(exist_ok=True)
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2"),
            *(("-passout", f"pass:{passphrase}") if passphrase else ("-nodes",)),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
