"""Explain known errors in an engine's log: ``explain(stream) -> Explanation``.

The rules are data: ``rules/TOPIC.toml``. ``_rule`` reads them, ``_index`` finds those that a line matches, ``_scan`` reads
a log, ``_explanation`` is the result, ``issue`` a text about what remains unexplained, ``inputs`` the sources of logs.
"""

from sm120kit.hosts.log_rules._explanation import Explanation, RuleMatch
from sm120kit.hosts.log_rules._rule import Kind, Rule, rules
from sm120kit.hosts.log_rules._scan import explain

__all__ = ["Explanation", "Kind", "Rule", "RuleMatch", "explain", "rules"]
