# SPDX-License-Identifier: Apache-2.0
"""Certificates that stand for themselves."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

# As RFC 5280 asks for them, and private authorities often do not have them.
_NO_KEY_IDENTIFIERS = (
    *("-config", "/dev/null", "-addext", "basicConstraints=critical,CA:TRUE"),
    *("-addext", "subjectKeyIdentifier=none"),
    *("-addext", "authorityKeyIdentifier=none"),
)


def certificate_of_authority(folder: Path) -> tuple[Path, Path, Path]:
    """Makes one of 127.0.0.1 without key identifiers, by an authority that has none either.

    Returns:
        Its file, that of its key, and the authority's certificate.
    """
    # By another name, or what it signs would seem to stand for itself.
    of_authority = (*_NO_KEY_IDENTIFIERS, "-subj", "/CN=authority")
    authority, authority_key = certificate(folder / "authority", options=of_authority)
    signed = ("-CA", str(authority), "-CAkey", str(authority_key))
    return (*certificate(folder / "host", options=(*_NO_KEY_IDENTIFIERS, *signed)), authority)


def certificate(
    folder: Path, passphrase: str = "", options: Sequence[str] = ()
) -> tuple[Path, Path]:
    """Makes one of 127.0.0.1, and its key; returns their files.

    Args:
        folder: Where; it is made where it is not there.
        passphrase: Of the key, "" for none.
        options: More of openssl's.
    """
    folder.mkdir(exist_ok=True)
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2"),
            *(("-passout", f"pass:{passphrase}") if passphrase else ("-nodes",)),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *options,
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
