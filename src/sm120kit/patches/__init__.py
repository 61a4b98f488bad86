"""``Checkout -> PatchedTree``: apply a series, check it, write the result to a directory, export it again.

A series is as good for one version as for another: how it drifts is what :func:`status` says about another pin.
"""

from sm120kit.patches.diff import Problem
from sm120kit.patches.export import edit, take_back
from sm120kit.patches.form import Patch, foreign, normal_form
from sm120kit.patches.series import fix, lint, load, projects
from sm120kit.patches.stack import Step, apply, compose, in_order, parts_of, status
from sm120kit.patches.tree import materialise

__all__ = [
    "Patch",
    "Problem",
    "Step",
    "apply",
    "compose",
    "edit",
    "fix",
    "foreign",
    "in_order",
    "lint",
    "load",
    "materialise",
    "normal_form",
    "parts_of",
    "projects",
    "status",
    "take_back",
]
