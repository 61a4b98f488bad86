"""Read what comes from outside: files, JSON, TOML, numbers, dates and encodings, each with a limit.

Every function raises only OSError (a file cannot be read) or ValueError (its content is malformed), so that a caller can name
the source and the remedy. Python's own readers also block, recurse, overflow, or need quadratic time.
"""

import contextlib
import email.utils
import errno
import io
import json
import math
import os
import re
import select
import stat
import tomllib
from collections.abc import Iterator
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

MAX_INPUT_BYTES = 2**31
"""Limit for files that users name: data sets of conversations have less than 1 GB."""
MAX_STREAM_BYTES = 2**26
"""Limit for devices and pipes in place of such a file: ``/dev/zero`` does not end."""
MAX_FOUND_BYTES = 2**26
"""Limit for files found in a directory from outside; the index of a checkpoint with 100,000 tensors has 10 MB."""
MAX_TOML_BYTES = 2**22
"""Limit for TOML; :mod:`tomllib` reads about 1 MB a second."""
MAX_YAML_CHARACTERS, MAX_YAML_VALUES = 2**18, 100_000
"""Limits for YAML, of which PyYAML reads about 200 kB a second, and whose aliases can repeat values."""
MAX_DEPTH = 100
"""Limit for nested lists and objects."""
MAX_KEY_PARTS = 16
"""Limit for the parts of a dotted key of TOML."""
MAX_DIGITS = 40
"""Limit for the digits of an integer: 128 bits, far below what a float holds."""
STREAM_SECONDS = 60
"""Time after which a pipe without data is given up."""
_CHUNK_BYTES = 2**20


# ---- files


def file_problem(path: Path) -> str:
    """Why ``path`` is not a readable file, such as "is a directory"; empty if it is."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    if stat.S_ISREG(mode):
        return ""
    return "is a directory" if stat.S_ISDIR(mode) else "is not a regular file"


def read_input(path: Path, limit: int = MAX_INPUT_BYTES) -> bytes:
    """The content of a file that a user names; of a device or anonymous pipe, if it ends within ``MAX_STREAM_BYTES``.

    Raises:
        OSError: it cannot be read, is a FIFO, or is larger than ``limit``.
    """
    return _read(path, limit, min(limit, MAX_STREAM_BYTES))


def read_found(path: Path, limit: int = MAX_FOUND_BYTES) -> bytes:
    """The content of a file found in a directory from outside: a regular file, or a link to one.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than ``limit``.
    """
    return _read(path, limit, 0)


def open_found(path: Path) -> io.BufferedReader:
    """Open a file found in a directory from outside, of any size: a regular file, or a link to one.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    return open(path, "rb", opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    file = _without_waiting(path, flags)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return file


def read_input_text(path: Path, limit: int = MAX_INPUT_BYTES) -> str:
    """The UTF-8 text of a file that a user names, with ``\\n`` at the ends of lines.

    Raises:
        OSError: see :func:`read_input`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return io.TextIOWrapper(io.BytesIO(read_input(path, limit)), "utf-8").read()


def _read(path: Path, limit: int, stream_limit: int) -> bytes:
    """Read a file up to ``limit`` bytes, a device or pipe up to ``stream_limit``; 0 refuses these."""
    with open(path, "rb", buffering=0, opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        regular = stat.S_ISREG(status.st_mode)
        if not regular and (not stream_limit or _is_fifo(file)):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        limit = limit if regular else stream_limit
        content = bytearray()
        if status.st_size <= limit:
            for chunk in _chunks(file, regular):
                content += chunk
                if len(content) > limit:
                    break
    if max(status.st_size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit / 2**20:g} MiB", str(path))
    return bytes(content)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a FIFO without a writer too, at once."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _is_fifo(file: io.FileIO) -> bool:
    """Whether a file is a FIFO with a name, which may never have a writer. Pipes of shells have none."""
    named = not str(Path(f"/proc/self/fd/{file.fileno()}").readlink()).startswith("pipe:")
    return named and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)


def _chunks(file: io.FileIO, regular: bool) -> Iterator[bytes]:
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    while regular or waiting.poll(STREAM_SECONDS * 1000):
        chunk = file.read(_CHUNK_BYTES)
        if chunk == b"":
            return
        yield chunk or b""
    raise OSError(errno.ETIMEDOUT, f"it sent nothing for {STREAM_SECONDS} s", str(file.name))


# ---- documents


def parse_json(content: str | bytes, *, lenient: bool = False) -> Any:
    """Parse a JSON document that sm120kit did not write.

    ``lenient`` makes None of numbers that JSON lacks (NaN, infinities, ``1e999``), which Python and so many checkpoints write.

    Raises:
        ValueError: it is not JSON, not UTF-8, nested too deeply, or has a number without a finite value or of too many digits.
    """

    def real(text: str) -> float | None:
        with contextlib.suppress(ValueError):
            return number(text)
        if lenient:
            return None
        raise ValueError(f"{text[:MAX_DIGITS]} is not a finite number")

    try:
        return _shallow(json.loads(content, parse_int=integer, parse_float=real, parse_constant=real))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def parse_yaml(text: str) -> Any:
    """Parse a YAML document.

    Raises:
        ValueError: it is not YAML, too large, nested too deeply, refers to itself, or has too many values with its aliases.
    """
    import yaml

    if len(text) > MAX_YAML_CHARACTERS:
        raise ValueError(f"it has more than {MAX_YAML_CHARACTERS:,} characters")
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None and _values(node, {}) > MAX_YAML_VALUES:
            raise ValueError(f"it has more than {MAX_YAML_VALUES} values")
        return _shallow(yaml.safe_load(text))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error).replace("\n", " ") if isinstance(error, yaml.YAMLError) else _TOO_DEEP) from None


def _values(node: Any, known: dict[int, int]) -> int:
    """The number of values of a node of YAML, those of an alias counted each time."""
    if id(node) not in known:
        known[id(node)] = MAX_YAML_VALUES + 1  # a node that contains itself
        content = node.value if isinstance(node.value, list) else ()
        parts = (part for each in content for part in (each if isinstance(each, tuple) else (each,)))
        known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return known[id(node)]


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: it is not TOML, too large, nested too deeply, or has a number without a finite value or of too many digits,
            or the character U+0000.
    """
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(f"it has more than {MAX_TOML_BYTES // 2**20} MiB")
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MAX_KEY_PARTS} parts")
    if _LONG_NUMBER.search(text):
        raise ValueError("a number has too many digits")
    try:
        content: dict[str, Any] = _shallow(tomllib.loads(text, parse_float=number), refused="\0")
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file that a user names.

    Raises:
        OSError: see :func:`read_input`.
        ValueError: see :func:`parse_toml`.
    """
    return parse_toml(read_input_text(path, MAX_TOML_BYTES))


_TOO_DEEP = "nested too deeply"
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_KEY_PARTS}}}")
"""A dotted key for which tomllib needs quadratic time. The quantifiers are possessive, so that the search is linear."""
_LONG_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d_?){300}")
"""A number for which Python needs quadratic time where its limit (``PYTHONINTMAXSTRDIGITS``) is off."""


def _shallow(document: Any, refused: str | None = None) -> Any:
    """A document with nesting that no later recursion exceeds, integers that no later arithmetic overflows, and no character
    ``refused`` in a text."""
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(MAX_DEPTH):
        children = [child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent)]
        if any(type(child) is int and child.bit_length() > _BITS for child in children):
            raise ValueError(f"a number has more than {MAX_DIGITS} digits")
        if refused and any(refused in text for text in chain(children, *level) if isinstance(text, str)):
            raise ValueError(
                f"a text has the character U+{ord(refused):04X}, which no argument, variable or file name can have"
            )
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return document
    raise ValueError(_TOO_DEEP)


_BITS = (10**MAX_DIGITS).bit_length()


# ---- values


_INTEGER = re.compile(rf"[+-]?[0-9]{{1,{MAX_DIGITS}}}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,9})?")


def integer(text: str) -> int:
    """A decimal integer of ASCII digits, at most ``MAX_DIGITS`` of them, without blanks and underscores.

    Raises:
        ValueError: it is something else. ``int`` also takes other scripts' digits, and needs quadratic time.
    """
    if not _INTEGER.fullmatch(text):
        shown = repr(text) if len(text) <= MAX_DIGITS else f"{text[:8]!r}... of {len(text)} characters"
        raise ValueError(f"{shown} is not an integer of at most {MAX_DIGITS} digits")
    return int(text)


def number(text: str) -> float:
    """A finite decimal number of ASCII digits.

    Raises:
        ValueError: it is something else: other scripts' digits, blanks, underscores, nan, an infinity, or too large.
    """
    if not _NUMBER.fullmatch(text) or not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:MAX_DIGITS]!r} is not a finite number")
    return value


def mail_date(text: str) -> datetime:
    """The date of a mail or HTTP header (RFC 5322), between 1900 and 9998 so that every clock can represent it.

    Raises:
        ValueError: it is something else.
    """
    try:
        if not text.isascii() or len(text) > 100:
            raise ValueError
        date = email.utils.parsedate_to_datetime(text)
        if not 1900 <= date.year < 9999:
            raise ValueError
    except (ValueError, TypeError, OverflowError, IndexError):
        raise ValueError(f"{text[:100]!r} is not a date of RFC 5322") from None
    return date


def encoding(charset: str | None) -> str:
    """The encoding that a sender states; ``utf-8`` for what is none of text, such as ``hex``, or needs quadratic time."""
    name = (charset or "").lower().replace("_", "-")
    return name if name in _CHARSETS else "utf-8"


_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "latin1", "iso-8859-15", "windows-1252", "utf-16"}
