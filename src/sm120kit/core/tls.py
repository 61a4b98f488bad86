"""TLS of requests to a server: which certificates it is verified by, and which one it gets."""

from __future__ import annotations

import errno
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True)
class Tls:
    """``authorities`` is a PEM file of the only accepted CAs instead of the system's; ``insecure`` accepts any server.

    ``certificate`` is the PEM file of the client's certificate, and of its key unless that is in ``key``.
    """

    authorities: Path | None = None
    insecure: bool = False
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """The settings of a connection. Without ``authorities``, the variables SSL_CERT_FILE and SSL_CERT_DIR apply.

        Raises:
            OSError: a file cannot be read, or is not a certificate or key (ssl.SSLError), or the key is encrypted.
        """
        return _context(self)


@functools.cache
def _context(tls: Tls) -> ssl.SSLContext:
    import ssl

    import httpx2

    for path in (tls.authorities, tls.certificate, tls.key):
        if path and path.is_char_device():  # OpenSSL would read /dev/zero without end
            raise OSError(errno.EINVAL, "is a device", str(path))
    if tls.authorities:
        context = ssl.create_default_context(cafile=tls.authorities)
    else:
        context = httpx2.create_ssl_context(verify=not tls.insecure)
    if tls.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls.certificate:
        context.load_cert_chain(tls.certificate, tls.key, password="")  # without a password, OpenSSL reads it from the terminal
    return context
