"""Which git URLs may be fetched. Others run programs (``ext::``, a host that is an option of ssh) or read local files.

Recipes and ``.gitmodules`` are not trusted, so a URL must have one of a few plain forms. Git's own transports are limited by
:data:`sm120kit.sources.git.PROTOCOLS` as well.
"""

import re
from collections.abc import Collection
from urllib.parse import unquote

from sm120kit.core.errors import NotTrusted
from sm120kit.core.urls import redacted

REMOTE = ("https", "ssh")
"""Transports for URLs of recipes."""
MIRROR = (*REMOTE, "http", "file")
"""Transports for ``--mirror``."""

_HOST = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_FORMS = (
    re.compile(rf"(?P<transport>https?|git)://(?:[^-@/\s][^@/\s]*@)?{_HOST}(?::[0-9]+)?/\S+"),
    re.compile(rf"(?P<transport>ssh)://(?:[A-Za-z0-9_][\w.+-]*@)?{_HOST}(?::[0-9]+)?/\S+"),
    re.compile(rf"(?:[A-Za-z0-9_][\w.+-]*@)?{_HOST}:(?![-:]|//)\S+"),  # user@host:path, which git fetches with ssh
    re.compile(r"file://(?=/).+|/.+"),
)
_TRANSPORTS = ("", "", "ssh", "file")


def transport_of(url: str) -> str:
    """``https``, ``http``, ``git``, ``ssh`` or ``file`` (also an absolute path); empty for anything else."""
    if re.search(r"[\x00-\x1f\x7f]", unquote(url)) or not url.isprintable():
        return ""
    for form, transport in zip(_FORMS, _TRANSPORTS, strict=True):
        if match := form.fullmatch(url):
            return transport or match["transport"]
    return ""


def without_credentials(url: str) -> str:
    """An http(s) URL for git's command line, which every user can read: git's credential helper has the name and password."""
    return re.sub(r"^(https?://)[^/?#]*@", r"\1", url)


def require_allowed(url: str, transports: Collection[str], subject: str) -> None:
    """Require that a git URL has a plain form with one of ``transports``. The error message starts with ``subject``.

    Raises:
        NotTrusted: it has another form or transport.
    """
    transport = transport_of(url)
    if transport in transports:
        return
    message = f"{subject} is {redacted(url)!r}"
    mirror = "or name a directory that holds a clone with --mirror"
    if transport:
        raise NotTrusted(f"{message}: only {' and '.join(REMOTE)} are allowed", f"write https, {mirror}")
    raise NotTrusted(
        f"{message}: a URL of this form is not allowed, because git could run it as an option or program",
        "write https://HOST/PATH, ssh://USER@HOST/PATH or USER@HOST:PATH; file:///PATH for a repository on this machine",
    )
