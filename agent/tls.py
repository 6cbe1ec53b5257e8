# SPDX-License-Identifier: Apache-2.0
"""TLS towards back-ends: whom to trust there, and by which certificate this host is known."""

from __future__ import annotations

import ssl
from pathlib import Path

from aiflame.agent.errors import UsageError


def client_context(
    ca_file: Path | None, cert_file: Path | None = None, key_file: Path | None = None
) -> ssl.SSLContext:
    """Returns what connections are made with; files are read now.

    Args:
        ca_file: Certificates to trust, None for the system's.
        cert_file: This host's own, with those between it and an authority, for back-ends that ask
            for one; None for none.
        key_file: Its key, without a passphrase.

    Raises:
        UsageError: A file cannot be read, or is none of these.
    """
    if (cert_file is None) != (key_file is None):
        raise UsageError(
            f"{cert_file or key_file}: a certificate without its key, or a key without its"
            " certificate",
            "name both, cert_file and key_file",
        )
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{ca_file}: no certificates to trust: {error}") from error
    if ca_file is not None:
        # Private authorities often have no key identifiers, which Python asks for from 3.13 on.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert_file is not None and key_file is not None:
        try:
            # Without a passphrase of its own OpenSSL would ask whoever sits at the terminal.
            context.load_cert_chain(cert_file, key_file, "")
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"{cert_file} and {key_file}: no certificate and key: {error}"
            ) from error
    return context
