"""The text of an issue about an unexplained log, without secrets and names of persons and hosts."""

from __future__ import annotations

from sm120kit.core.secrets import anonymous
from sm120kit.hosts.log_rules.records import Explanation, Kind


def issue_text(explanation: Explanation) -> str:
    """Markdown with the versions that a log names and the lines that are most likely to matter."""
    numbered = {error.number: error.line for error in explanation.errors}
    numbered |= {match.number: match.line for match in explanation.found if match.rule.kind is not Kind.HARMLESS}
    versions = [f"- {name}: {version}" for name, version in sorted(explanation.versions.items())]
    lines = [numbered[number] for number in sorted(numbered)]
    return anonymous(
        "\n".join(
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
    )
