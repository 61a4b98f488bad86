"""Checks of every image: user, installed distributions and files, bytecode, and files that must be absent."""

import base64
import csv
import functools
import hashlib
import importlib.util
import os
import pwd
import re
import stat
import subprocess
import sys
import tempfile
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

PREFIX = Path(sys.prefix)
SITE = Path(next(path for path in sys.path if path.endswith("site-packages")))
ETC, HOMES = Path("/etc"), (Path.home(), Path("/root"))
SETTINGS = ("pip.conf", ".netrc", "_netrc", ".pypirc", "uv.toml", ".git-credentials", ".dockercfg")
SECRET = re.compile(r"(?i)(token|secret|password|passwd|credential|api_?key|index_url|find_links|proxy)")
COMPILED = re.compile(r"\.[^.]+(\.opt-\d)?\.pyc$")
VENV_FILES = re.compile(r"bin/(python[\d.]*|[Aa]ctivate[\w.]*)$|pyvenv\.cfg$")

QUICK = ("user", "versions", "files", "bytecode", "requirements", "no_secrets")
"""Checks of an image that differs from a checked one in Python files only."""

BESIDE = ("imports_without_left_out",)
"""Checks that run in a process of their own beside the others."""


def normal(name):
    """The normalized name of a distribution, as in locks (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def distributions():
    """All installed distributions, each with its normalized name and the headers of its METADATA, which are parsed once."""
    found = metadata.distributions(path=[str(SITE)])
    headers = ((each, HeaderParser().parsestr(each.read_text("METADATA"))) for each in found)
    return [(normal(header["Name"]), each, header) for each, header in headers]


def requirements_of(header):
    """The requirements of a distribution, as texts."""
    return header.get_all("Requires-Dist", ())


def check_user(expected):
    """The container runs as a named user other than root, with a home directory of its own."""
    user = pwd.getpwuid(os.getuid())
    assert user.pw_uid != 0 and os.getgid() != 0, f"runs as uid {user.pw_uid}, gid {os.getgid()}"
    home = Path(user.pw_dir)
    assert os.access(home, os.W_OK) and home.stat().st_uid == user.pw_uid, f"{home} is not the user's, or not writable"
    return {"user": f"{user.pw_name} ({user.pw_uid})"}


def check_versions(expected):
    """Exactly the distributions of the lock and of the build are installed, in these versions."""
    installed = {name: header["Version"] for name, _, header in distributions()}
    locked = {normal(name): version for name, version in expected["distributions"].items()}
    differ = [name for name, version in locked.items() if installed.get(name) != version]
    problems = [f"{name} {installed.get(name, 'absent')}, not {locked[name]}" for name in differ]
    problems += [f"{name} {version} is not in the lock" for name, version in installed.items() if name not in locked]
    assert not problems, "; ".join(sorted(problems))
    return {"python": sys.version.split()[0], "distributions": str(len(installed))}


def recorded(distribution):
    """All paths of a distribution's RECORD, missing files included, each with its algorithm and hash, or None.

    Since Python 3.12 ``Distribution.files`` leaves out missing files.
    """
    for path, hash_, _ in csv.reader(distribution.read_text("RECORD").splitlines()):
        algorithm, _, value = hash_.partition("=")
        yield path, (algorithm, value) if value else None


def check_left_out(expected):
    """The files that the recipe leaves out are absent, and no library misses them.

    No library of the image is linked with one of them.
    """
    from driver_stub import dynamic_strings

    left, names, claimed = {}, set(), set()
    for name, distribution, _ in distributions():
        claimed |= {file for file, _ in recorded(distribution) if not is_left_out(expected, name, file)}  # noqa: F821
    for name, distribution, _ in distributions():
        if name not in expected.get("leave_out", {}):
            continue
        rows = csv.reader(distribution.read_text("RECORD").splitlines())
        absent = [(file, int(size or 0)) for file, _, size in rows if is_left_out(expected, name, file)]  # noqa: F821 - the runner provides it
        present = [file for file, _ in absent if file not in claimed and os.path.lexists(SITE / file)]
        assert absent and not present, f"{name}: {', '.join(present[:5]) or 'no file matches'}"
        left[name] = (len(absent), sum(size for _, size in absent))
        names |= {Path(file).name for file, _ in absent if ".so" in Path(file).name}
    unknown = {*expected.get("leave_out", {})} - {*left}
    assert not unknown, f"not installed: {', '.join(sorted(unknown))}"
    libraries = sorted(PREFIX.rglob("*.so*")) if names else []
    names -= {path.name for path in libraries}  # another toolkit's library of the same name
    needed = [
        f"{path} needs {name}"
        for path in (libraries if names else ())
        if path.is_file() and (strings := dynamic_strings(path))
        for name in sorted(names)
        if f"\0{name}\0".encode() in strings
    ]
    assert not needed, "; ".join(needed[:5])
    listed = [f"{name}: {count} files, {size} bytes" for name, (count, size) in sorted(left.items())]
    return {"files left out": "; ".join(listed) or "none", "bytes left out": str(sum(size for _, size in left.values()))}


def check_imports_without_left_out(expected):
    """The modules that the recipe lists, which could miss the files that it leaves out, can be imported."""
    modules = expected.get("imports", ())
    if modules:
        program = "import gc, importlib, os, sys; gc.disable(); [*map(importlib.import_module, sys.argv[1:])]; os._exit(0)"
        with tempfile.TemporaryDirectory() as home:  # modules write caches there, which later checks would find
            argv, environment = [sys.executable, "-c", program, *modules], {**os.environ, "HOME": home}
            done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"cannot import {', '.join(modules)}: {done.stderr.strip().splitlines()[-1:]}"
    return {"imported without them": ", ".join(modules)} if modules else {}


def digest_of_file(path, algorithm):
    """The hash of a file as RECORD has it. Files of hundreds of megabytes are not read as a whole."""
    with Path(path).open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def check_files(expected):
    """Every file in the RECORD of a wheel has its hash there or is left out, and every installed file belongs to a wheel.

    If unrelated wheels contain the same path, the file must be that of one of them and is reported. If a wheel requires
    another, the file must be that of the wheel that requires. ``digests`` of ``expected`` are not computed again: those of the
    files of layers, which were compared with their digest at the same time. If ``changed`` is set, only those files are
    compared: the others are those of an image that passed this check.
    """
    known, read, changed = expected.get("digests", {}), 0, expected.get("changed")
    changed = changed if changed is None else {*changed}
    claims, needs, titles, wrong = {}, {}, {}, []
    for name, distribution, header in distributions():
        always = [text for text in requirements_of(header) if "extra ==" not in text]
        needs[name] = {normal(re.match(r"[\w.-]+", text)[0]) for text in always}
        titles[name] = f"{header['Name']} {header['Version']}"
        for file, hash_ in recorded(distribution):
            path = os.path.normpath(f"{SITE}/{file}") if ".." in file else f"{SITE}/{file}"
            if changed is not None and path not in changed:
                continue
            if is_left_out(expected, name, file):  # noqa: F821 - the runner provides it
                continue
            if is_left_out(expected, name, file, "wrong_record"):  # noqa: F821
                wrong.append(file)
                hash_ = None
            claims.setdefault(path, []).append((name, hash_))
    problems, shared = [], []
    for path, wheels in claims.items():
        if len(wheels) > 1:
            required = set().union(*(needs[name] for name, _ in wheels))
            wheels = [(name, hash_) for name, hash_ in wheels if name not in required] or wheels
        # Bytecode is compiled for the image, also that of a wheel; check_bytecode compares it with its source instead.
        hashes = [hash_ for _, hash_ in wheels if hash_ is not None and "/__pycache__/" not in path]
        if not hashes and not os.path.lexists(path):
            problems.append(f"{path}: No such file")
            continue
        owners = " and ".join(titles[name] for name, _ in wheels)
        try:
            algorithms = {algorithm for algorithm, _ in hashes}
            if algorithms == {"sha256"} and path in known and stat.S_ISREG(os.lstat(path).st_mode):
                digests = {"sha256": known[path].partition("=")[2]}
            else:
                digests = {algorithm: digest_of_file(path, algorithm) for algorithm in algorithms}
                read += bool(algorithms)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        same = [value == digests[algorithm] for algorithm, value in hashes]
        if same and not any(same):
            problems.append(f"{path} is not the file of {owners}")
        elif not all(same):
            shared.append(f"{Path(path).name} of {owners}")
    walked = (f"{parent}/{name}" for parent, _, files in os.walk(PREFIX) for name in files)
    for path in walked if changed is None else filter(os.path.lexists, changed):
        if path not in claims and "/__pycache__/" not in path and not VENV_FILES.match(path.removeprefix(f"{PREFIX}/")):
            problems.append(f"{path} belongs to no wheel")
    assert not problems, f"{len(problems)}: " + "; ".join(problems[:5])
    facts = {
        "checked files": str(len(claims)),
        "files read": str(read),
        "several wheels bring": "; ".join(shared) or "nothing",
    }
    return facts | {"not as in their RECORD": ", ".join(wrong)} if wrong else facts


def check_bytecode(expected):
    """Bytecode belongs to its source. Python does not check that itself: the bytecode is unchecked hash-based.

    If ``changed`` of ``expected`` is set, all other files are those of an image that passed this check. A source that cannot be
    compiled leaves the bytecode of the released file in a lower layer.
    """
    count, problems, changed = 0, [], expected.get("changed")
    compiled = {path for text in changed or () if text.endswith(".pyc") and (path := Path(text)).exists()}
    sources = (Path(text) for text in changed or () if text.endswith(".py"))
    compiled |= {path for source in sources for path in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")}
    for path in SITE.rglob("__pycache__/*.pyc") if changed is None else compiled:
        source = path.parents[1] / COMPILED.sub(".py", path.name)
        with path.open("rb") as file:
            head = file.read(16)
        if not source.is_file() or head[8:16] != importlib.util.source_hash(source.read_bytes()):
            problems.append(str(path))
        count += 1
    assert not problems, f"{len(problems)} do not belong to their source: " + "; ".join(problems[:5])
    return {"bytecode files": str(count)} if changed is None else {"bytecode files compared again": str(count)}


def check_requirements(expected):
    """Every requirement of every distribution is satisfied, except those that the recipe overrides."""
    from packaging.requirements import Requirement

    problems = []
    overridden = {normal(name) for name in expected["overridden"]}
    installed = {name: header["Version"] for name, _, header in distributions()}
    for title, text in ((header["Name"], text) for _, _, header in distributions() for text in requirements_of(header)):
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(name := normal(requirement.name))
        if version is None:
            problems.append(f"{title} requires {requirement}, which is absent")
        elif name not in overridden and not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{title} requires {requirement}, installed is {version}")
    assert not problems, "; ".join(sorted(problems))
    return {"overridden": ", ".join(sorted(overridden)) or "nothing"}


def check_no_secrets(expected):
    """No index setting, credential or proxy is in the environment or in files that programs read them from."""
    names = [name for name in os.environ if SECRET.search(name)]
    assert not names, f"environment: {', '.join(names)}"
    directories = [ETC, *HOMES, PREFIX]
    files = [str(parent / name) for parent in directories for name in SETTINGS if os.path.lexists(parent / name)]
    files += [
        str(path)
        for home in HOMES
        for name in (".docker", ".ssh", ".config", ".cache")
        if os.access(home, os.X_OK)
        for path in [home / name, *(home / name).rglob("*")]
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir())
    ]
    assert not files, ", ".join(files)
    origins = [str(path) for path in SITE.glob("*.dist-info/direct_url.json")]
    assert not origins, f"these record the origin of a wheel: {', '.join(origins)}"
