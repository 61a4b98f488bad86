"""Patch series: read and check them, apply them to a checkout, write the result to a directory, export commits as patches."""

from sm120kit.patches._apply import apply, compose, index_file, materialise
from sm120kit.patches._edits import EditedSource, edit, export_edits
from sm120kit.patches._files import dependents, drop, find
from sm120kit.patches.diff import Problem
from sm120kit.patches.drift import Step, status
from sm120kit.patches.foreign import ImportTarget, import_patches, of_the_source
from sm120kit.patches.format import Patch, normal_form, read_foreign
from sm120kit.patches.mails import read_diffs
from sm120kit.patches.patch_records import TreeProject, projects_in_tree
from sm120kit.patches.series import lint, load, load_for_tree, origin, projects

__all__ = [
    "EditedSource",
    "ImportTarget",
    "Patch",
    "Problem",
    "Step",
    "TreeProject",
    "apply",
    "compose",
    "dependents",
    "drop",
    "edit",
    "export_edits",
    "find",
    "import_patches",
    "index_file",
    "lint",
    "load",
    "load_for_tree",
    "materialise",
    "normal_form",
    "of_the_source",
    "origin",
    "projects",
    "projects_in_tree",
    "read_diffs",
    "read_foreign",
    "status",
]
