"""Draft the recipe of a release from the recipe of another one and the facts of its source. Nothing is read or written."""

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatch, fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from sm120kit.core.errors import ResolutionFailed
from sm120kit.engines import of_recipe
from sm120kit.recipes import _toml_text
from sm120kit.recipes.locked_toolchain import FFI
from sm120kit.recipes.lockfile import FLASHINFER
from sm120kit.recipes.schema import FLASHINFER_KEY
from sm120kit.sources.index import ListedFile
from sm120kit.sources.wheel_metadata import WheelMetadata

CUBIN_CHECK = "FLASHINFER_DISABLE_VERSION_CHECK"
"""Variable without which FlashInfer refuses a flashinfer-cubin whose version is not its own."""

_OVERRIDES = "overrides of "


def title(engine: str) -> str:
    """The name in prose of an engine, or of FlashInfer."""
    return "FlashInfer" if engine == FLASHINFER_KEY else of_recipe(engine).title


def distribution(engine: str) -> str:
    """The distribution of an engine, or of FlashInfer, on the package index."""
    return FLASHINFER if engine == FLASHINFER_KEY else engine


@dataclass
class Draft:
    """A recipe that is being made of the recipe ``template``: its TOML as ``data``, and what a person has to decide."""

    name: str
    data: dict[str, Any]
    template: str
    decisions: list[str] = field(default_factory=list)

    def toml(self) -> str:
        """The text of the recipe."""
        return _toml_text.write(self.data, f"Drafted from {self.template}: its reasons and estimates were not checked.")


@dataclass(frozen=True)
class Template:
    """A recipe that another one is drafted from: its name and its TOML."""

    name: str
    data: Mapping[str, Any]

    @property
    def version(self) -> str:
        """The version of its engine."""
        return str(self.data["version"])


@dataclass(frozen=True)
class Python:
    """The Python and platform of an environment, for the markers of requirements."""

    version: str
    platform: str

    @property
    def markers(self) -> dict[str, str]:
        """The values of environment markers (PEP 508) that differ from those of this Python, CPython on Linux."""
        return {
            "python_version": self.version,
            "python_full_version": f"{self.version}.0",
            "platform_machine": self.platform.split("_", 3)[3],
            "extra": "",
        }


def requirements(contents: WheelMetadata, python: Python) -> dict[str, Requirement]:
    """The requirements of a wheel without extras that apply to an environment, by normalized name."""
    parsed = {}
    for line in contents.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate(python.markers):
            parsed[str(canonicalize_name(requirement.name))] = requirement
    return parsed


def exact(requirement: Requirement | None) -> str:
    """The version of a requirement ``name==version``; empty for any other."""
    specifiers = list(requirement.specifier) if requirement else []
    pinned = len(specifiers) == 1 and specifiers[0].operator == "==" and not specifiers[0].version.endswith("*")
    return specifiers[0].version if pinned else ""


def extension_modules(contents: WheelMetadata) -> set[str]:
    """The extension modules of a wheel by their dotted names."""
    paths = (PurePosixPath(member) for member in contents.members if member.endswith(".so"))
    return {".".join((*path.parts[:-1], path.name.partition(".")[0])) for path in paths}


def nearest(version: str, templates: Sequence[str], releases: Sequence[str]) -> str:
    """Of versions with a recipe, that with the fewest releases between it and ``version``; of two, the newer."""
    order = sorted({Version(each) for each in (*releases, *templates, version)})
    position = {each: number for number, each in enumerate(order)}
    at = position[Version(version)]
    return min(templates, key=lambda each: (abs(position[Version(each)] - at), -position[Version(each)]))


def draft_flashinfer(template: Template, sdist: ListedFile, cutlass: tuple[str, str], ffi: str, engine: str = "") -> Draft:
    """Draft a FlashInfer recipe. All modules and groups of the template are taken over, see :func:`keep_modules`.

    ``cutlass`` are path and version of CUTLASS in the source, ``ffi`` the version of tvm-ffi, ``engine`` the release that pins
    this version, in prose.
    """
    data = copy.deepcopy(dict(template.data))
    version = sdist.version
    name = f"flashinfer-{version}"
    data |= {
        "name": name,
        "version": version,
        "summary": f"pinned by {engine}" if engine else f"FlashInfer {version}",
        "sources": {
            "flashinfer": {"sdist": FLASHINFER, "version": version, "sha256": sdist.location.sha256},
            "cutlass": {"inside": "flashinfer", "path": cutlass[0], "version": cutlass[1]},
        },
    }
    requires = data.get("environment", {}).get("requires", [])
    data.get("environment", {})["requires"] = [f"{FFI}=={ffi}" if each.startswith(f"{FFI}==") else each for each in requires]
    for table in data["modules"].values():
        table.pop("expect_kernels", None)
    return Draft(name, data, template.name, ["kernels are not counted yet: add expect_kernels after the first build"])


def keep_modules(draft: Draft, sources: Mapping[str, Sequence[str]], failures: Mapping[str, str]) -> None:
    """Keep the modules whose generators ran, with the parts of them that still match.

    ``sources`` are the names of the source files that the generators wrote, by module; ``failures`` the reason why a generator
    failed, by module.
    """
    modules: dict[str, Any] = draft.data["modules"]
    for name, reason in failures.items():
        del modules[name]
        draft.decisions.append(f"module {name} is left out: {reason}")
    for name, table in modules.items():
        kept = [entry for entry in table.pop("leave_out", []) if any(fnmatch(file, entry["units"]) for file in sources[name])]
        table |= {"leave_out": kept} if kept else {}
    groups: dict[str, Any] = draft.data["groups"]
    for name, group in list(groups.items()):
        group["modules"] = [module for module in group["modules"] if module in modules]
        if not group["modules"]:
            del groups[name]
    if draft.data["default_group"] not in groups and groups:
        draft.data["default_group"] = next(iter(groups))
        draft.decisions.append(f"default group {draft.data['default_group']}, as that of {draft.template} has no module")


def draft_engine(
    template: Template,
    wheel: ListedFile,
    contents: tuple[WheelMetadata, WheelMetadata],
    flashinfer: Template | Draft,
    variant: str = "",
) -> Draft:
    """Draft the recipe of an engine, with all overrides of the template.

    ``contents`` are those of the engine's wheel and of the template's, ``flashinfer`` is the FlashInfer recipe with the version
    that the wheel requires.
    """
    new, old = contents
    data = copy.deepcopy(dict(template.data))
    engine, version, pinned = data["engine"], wheel.version, flashinfer.data["version"]
    environment = data["environment"]
    python = Python(environment["python"], environment["platforms"][0])
    required = requirements(new, python)
    name = f"{engine}-{version}{variant}"
    former = data["flashinfer"].removeprefix("flashinfer-")
    data |= {
        "name": name,
        "version": version,
        "summary": f"pins FlashInfer {pinned}",
        "state": "resolved",
        "flashinfer": flashinfer.name,
    }
    draft = Draft(name, data, template.name)
    environment["requires"] = list(_requires(draft, environment["requires"], engine, new.extras))
    if wheel.uploaded:
        environment["as_of"] = (wheel.uploaded + timedelta(days=1)).date().isoformat()
    else:
        environment.pop("as_of", None)
        draft.decisions.append("as_of: the index states no time of upload; set the day after the release, or leave it out")
    if overrides := ", ".join(environment.get("overrides", ())):
        draft.decisions.append(f"{_OVERRIDES}{overrides}: remove those without which `sm120kit recipe lock` resolves as well")
    if data["kernels"] not in flashinfer.data["groups"]:
        data["kernels"] = flashinfer.data["default_group"]
        draft.decisions.append(
            f"kernels: {flashinfer.name} has no group {template.data['kernels']!r}; the default group is used"
        )
    data["built"] = [
        {**part, "reason": _versions(part["reason"], {former: pinned, template.version: version})} for part in data["built"]
    ]
    if "source" in data:
        data["source"] = {"wheel": wheel.filename, "sha256": wheel.location.sha256}
    if data.pop("from_source", None):
        data["built"] = [part for part in data["built"] if part["what"] != engine]
        draft.decisions.append(f"from_source of {template.name} is not taken over: compare its targets with this source")
    _keep_upstream(draft, extension_modules(new), extension_modules(old), required)
    _keep_left_out(draft, new.members)
    return draft


def resolvable(draft: Draft, failures: Sequence[ResolutionFailed]) -> Iterator[Draft]:
    """Drafts of an engine of which the first is locked that resolves: without overrides, as it is, without extras.

    ``failures`` has the error of each draft before.
    """
    environment = draft.data["environment"]
    if "overrides" in environment:
        decided = [decision for decision in draft.decisions if not decision.startswith(_OVERRIDES)]
        yield _with_environment(draft, {key: value for key, value in environment.items() if key != "overrides"}, decided)
    yield draft
    if extras := [line for line in environment["requires"] if line.startswith(f"{draft.data['engine']}[")]:
        requires = [line for line in environment["requires"] if line not in extras]
        left_out = f"{', '.join(extras)} of {draft.template} is left out, because its wheels do not resolve with it"
        decisions = [*draft.decisions, f"{left_out}: {_cause(failures[-1])}"]
        yield _with_environment(draft, {**environment, "requires": requires}, decisions)


def _with_environment(draft: Draft, environment: Mapping[str, Any], decisions: list[str]) -> Draft:
    return Draft(draft.name, {**draft.data, "environment": environment}, draft.template, decisions)


def _cause(failure: ResolutionFailed) -> str:
    """The first sentence of the resolver on why wheels do not resolve."""
    reasons = (line.partition("cause:")[2] for line in failure.message.splitlines() if "cause:" in line)
    return next(reasons, failure.message.partition("\n")[0]).strip()


def _versions(text: str, replaced: Mapping[str, str]) -> str:
    """A text with whole versions replaced: 0.7.2 is not a part of 0.7.2.post1."""
    pattern = "|".join(re.escape(old) for old in sorted(replaced, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])({pattern})(?![\w]|\.\w)", lambda match: replaced[match[1]], text)


def _requires(draft: Draft, lines: Sequence[str], engine: str, extras: Collection[str]) -> Iterator[str]:
    """The requirements of a template with the engine's version; extras that the wheel no longer has are left out."""
    for line in lines:
        name, _, version = line.partition("==")
        base, _, of_line = name.rstrip("]").partition("[")
        if base != engine:
            yield line
        elif gone := [each for each in of_line.split(",") if of_line and each not in extras]:
            draft.decisions.append(f"{line}: {engine} {draft.data['version']} has no extra {', '.join(gone)}; left out")
        else:
            yield f"{name}=={draft.data['version']}" if version else line


def _keep_upstream(draft: Draft, modules: set[str], former: set[str], required: Mapping[str, Requirement]) -> None:
    """Keep the upstream parts that the wheel still has; ``former`` are the extension modules of the template's wheel."""
    engine = draft.data["engine"]
    kept = []
    for part in draft.data["upstream"]:
        names = re.findall(rf"\b{engine}\.[\w.]*\w", part["what"])
        gone = [name for name in names if not any(module == name or module.startswith(f"{name}.") for module in modules)]
        if names and gone == names:
            continue
        if gone:
            draft.decisions.append(f"upstream {part['what']}: the wheel has no {', '.join(gone)}; correct the entry")
            kept.append(part)
        elif not names and canonicalize_name(part["what"]) == "flashinfer-cubin" and "flashinfer-cubin" not in required:
            draft.data.get("env", {}).pop(CUBIN_CHECK, None)
        else:
            kept.append(part)
    draft.data["upstream"] = kept
    new = sorted(modules - former)
    if kept or new:
        text = f"upstream: the reasons are those of {draft.template}; compare with `cuobjdump` of the wheel of this release"
        draft.decisions.append(text + (f"; it also has the modules {', '.join(new)}" if new else ""))


def _keep_left_out(draft: Draft, members: Sequence[str]) -> None:
    """Keep the entries on files of wheels; of the engine's own wheel, those patterns that match one of its ``members``."""
    engine, entries = draft.data["engine"], draft.data.get("leave_out", [])
    kept = []
    for entry in entries:
        own = entry["distribution"] == engine
        files = [pattern for pattern in entry["files"] if not own or any(fnmatchcase(path, pattern) for path in members)]
        kept += [{**entry, "files": files}] if files else []
    if entries:
        draft.data["leave_out"] = kept
    taken_over = [key for key in ("leave_out", "wrong_record", "b12x") if draft.data.get(key)]
    if taken_over:
        entries = ", ".join(taken_over)
        draft.decisions.append(f"{entries}: those of {draft.template}; compare them with the wheels of this release")


def require_pin_of_flashinfer(engine: str, version: str, required: Mapping[str, Requirement]) -> str:
    """The FlashInfer version that an engine requires.

    Raises:
        ResolutionFailed: it requires none, or none in particular.
    """
    requirement = required.get(FLASHINFER)
    if pinned := exact(requirement):
        return pinned
    problem = f"requires {requirement}" if requirement else f"does not require {FLASHINFER}"
    raise ResolutionFailed(
        f"{title(engine)} {version} {problem}: a recipe needs one version of FlashInfer",
        "write the recipe by hand, see docs/update.md",
    )
