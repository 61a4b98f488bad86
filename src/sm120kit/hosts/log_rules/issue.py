"""The text of an issue about an unexplained log, without secrets and names of persons and hosts."""

from __future__ import annotations

import re
import socket

from sm120kit.core.urls import REDACTED, redacted
from sm120kit.hosts.log_rules.records import Explanation, Kind

_SECRETS = [
    (re.compile(r"\b(?:hf|sk|ghp|gho|ghs|github_pat|glpat|nvapi|xox[abp])[-_][\w-]{8,}"), REDACTED),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}"), REDACTED),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), REDACTED),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {REDACTED}"),
    (
        re.compile(
            r"(?i)((?:api[_-]?key|access[_-]?key|token|passw(?:or)?d|secret|credential)(?:_?id|\w{0,3})['\"]?\s*[:=]\s*\[?['\"]?)(?!\d)[^\s,'\"\])}]+"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)(--(?:[\w-]*(?:api-key|token|password|secret))\s+)\S+"), rf"\1{REDACTED}"),
]
_NAMES = [
    (re.compile(r"(?:/home|/Users|\\Users)[/\\][^/\\\s:'\"]+|/root(?=[/\s'\"]|$)"), "~"),
    (re.compile(r"^(\s*(?:\w{3} [ \d]\d [\d:]{8}|\d{4}-\d\d-\d\dT\S+) )\S+( [\w./-]+(?:\[\d+\])?:)"), r"\1HOST\2"),
    (re.compile(r"(?<![\w.-])[\w.-]+(:\d+:\d+ \[\d+\] NCCL)"), r"HOST\1"),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.]+\b"), "USER@HOST"),
    (re.compile(r"\b[\w.-]+@[\w.-]+(?=:[~/])"), "USER@HOST"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE), "MAC"),
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]+\b", re.IGNORECASE), "UUID"),
    (re.compile(r"(?<![\w.-])(?<!==)(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"), "ADDRESS"),
    (re.compile(r"\bf(?:e80|[cd][0-9a-f]{2}):[0-9a-f:]+(?:%\w+)?", re.IGNORECASE), "ADDRESS"),
]


def without_names(text: str) -> str:
    """A line of a log without tokens, home directories, host and user names, and addresses."""
    text = redacted(text)
    for pattern, replacement in (*_SECRETS, *_NAMES):
        text = pattern.sub(replacement, text)
    own = socket.gethostname().partition(".")[0]
    return re.sub(rf"(?<![\w-]){re.escape(own)}(?![\w-])", "HOST", text) if len(own) > 2 and own != "localhost" else text


def issue_text(explanation: Explanation) -> str:
    """Markdown with the versions that a log names and the lines that are most likely to matter."""
    numbered = {error.number: error.line for error in explanation.errors}
    numbered |= {match.number: match.line for match in explanation.found if match.rule.kind is not Kind.HARMLESS}
    versions = [f"- {name}: {without_names(version)}" for name, version in sorted(explanation.versions.items())]
    lines = [without_names(numbered[number]) for number in sorted(numbered)]
    return "\n".join(
        [
            "### Environment",
            *(versions or ["- GPU, driver and versions: (the log does not name them)"]),
            "- command:",
            "",
            f"### Log ({explanation.lines} line{'s' * (explanation.lines != 1)})",
            "```",
            *(lines or ["(no line looks like an error)"]),
            "```",
        ]
    )
