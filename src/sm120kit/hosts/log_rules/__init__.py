"""Explain known errors in an engine's log by rules that are data: ``explain(stream) -> Explanation``."""

from sm120kit.hosts.log_rules._explanation import Explanation, RuleMatch, issue_text, search_address
from sm120kit.hosts.log_rules._rule import Kind, Rule, rules
from sm120kit.hosts.log_rules._scan import explain

__all__ = ["Explanation", "Kind", "Rule", "RuleMatch", "explain", "issue_text", "rules", "search_address"]
