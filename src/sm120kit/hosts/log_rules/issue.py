"""What helps to report an unexplained log: a text for an issue, and the address of a search in the engine's tracker."""

from __future__ import annotations

import re
import textwrap
from urllib.parse import quote_plus

from sm120kit.core.secrets import anonymous
from sm120kit.engines import find
from sm120kit.hosts.log_rules import _lines
from sm120kit.hosts.log_rules._explanation import Explanation
from sm120kit.hosts.log_rules._rule import Kind

_VARIABLE = re.compile(r"0x[0-9a-f]+|[\w.-]*[/\\][\w./\\-]+|\b\d[\d.,]*\b|[^\w\s.:'_-]+", re.IGNORECASE)
"""Parts of a message that differ from host to host: addresses, paths, numbers, marks."""
_EXCEPTION = re.compile(r"[\w.]{0,80}(?:Error|Exception)\b")
_SEARCH_CHARACTERS = 160


def issue_text(explanation: Explanation) -> str:
    """Markdown with the versions that a log names and the lines that are most likely to matter, for strangers."""
    numbered = {error.number: error.line for error in explanation.errors}
    numbered |= {match.number: match.line for match in explanation.found if match.kind is not Kind.HARMLESS}
    versions = [f"- {name}: {version}" for name, version in sorted(explanation.versions.items())]
    lines = [
        "### Environment",
        *(versions or ["- GPU, driver and versions: (the log does not name them)"]),
        "- command:",
        "",
        f"### Log ({explanation.lines} line{'s' * (explanation.lines != 1)})",
        "```",
        *([numbered[number] for number in sorted(numbered)] or ["(no line looks like an error)"]),
        "```",
    ]
    return anonymous("\n".join(lines))


def search_address(explanation: Explanation) -> str:
    """A search for the first exception, or line that may matter, in the engine's tracker; "" if there is none."""
    if not explanation.errors:
        return ""
    lines = [anonymous(_lines.without_prefix(error.line)) for error in explanation.errors]
    message = next(filter(_EXCEPTION.match, lines), lines[0])
    words = textwrap.shorten(_VARIABLE.sub(" ", message), _SEARCH_CHARACTERS, placeholder="")
    repository = getattr(find(explanation.engine), "repository", "")
    place = f"https://github.com/{repository}/issues?" if repository else "https://github.com/search?type=issues&"
    return f"{place}q={quote_plus(words)}"
