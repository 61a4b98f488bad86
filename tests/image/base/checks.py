"""What holds for every image: who runs, who owns what, what is installed, and what must not be there."""

import base64
import fnmatch
import hashlib
import os
import pwd
import re
import stat
import sys
from importlib import metadata
from pathlib import Path

PREFIX = Path(sys.prefix)
SITE = Path(next(path for path in sys.path if path.endswith("site-packages")))
OPT, ETC, HOMES = Path("/opt"), Path("/etc"), (Path.home(), Path("/root"))
TOOLKIT, BUILD = Path("/usr/local/cuda"), (Path("/context"), Path("/overlay"))
TOOLS = ("nvcc", "ptxas", "cicc", "gcc", "g++", "cc", "c++", "clang", "clang++", "ld", "make", "cmake", "cargo", "rustc", "git")
SETTINGS = ("pip.conf", ".netrc", "_netrc", ".pypirc", "uv.toml", ".git-credentials", ".dockercfg")
SECRET = re.compile(r"(?i)(token|secret|password|passwd|credential|api_?key|index_url|find_links|proxy)")
COMPILED = re.compile(r"\.[^.]+(\.opt-\d)?\.pyc$")
VENV_FILES = re.compile(r"bin/(python[\d.]*|[Aa]ctivate[\w.]*)$|pyvenv\.cfg$")


def normal(name):
    """A distribution's name as locks have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check_user(expected):
    """It runs as a user that is not root, known by name, with a home of its own."""
    user = pwd.getpwuid(os.getuid())
    assert user.pw_uid != 0 and os.getgid() != 0, f"runs as uid {user.pw_uid}, gid {os.getgid()}"
    home = Path(user.pw_dir)
    assert os.access(home, os.W_OK) and home.stat().st_uid == user.pw_uid, f"{home} is not its own"
    return {"user": f"{user.pw_name} ({user.pw_uid})"}


def check_owners(expected):
    """What is installed belongs to root, and the user cannot change it."""
    count = 0
    for folder, folders, files in os.walk(OPT if PREFIX.is_relative_to(OPT) else PREFIX):
        for name in [*folders, *files]:
            path = Path(folder, name)
            said = path.lstat()
            assert said.st_uid == 0 and said.st_gid == 0, f"{path} belongs to {said.st_uid}:{said.st_gid}"
            assert stat.S_ISLNK(said.st_mode) or not said.st_mode & 0o7022, f"{path} has mode {said.st_mode:o}"
            count += 1
    assert not os.access(PREFIX, os.W_OK), f"{PREFIX} can be written"
    return {"files": str(count)}


def check_versions(expected):
    """Exactly the distributions that the lock and the build name are installed, in these versions."""
    found = {normal(d.metadata["Name"]): d.version for d in metadata.distributions(path=[str(SITE)])}
    wanted = {normal(name): version for name, version in expected["distributions"].items()}
    differ = [name for name, version in wanted.items() if found.get(name) != version]
    wrong = [f"{name} {found.get(name, 'absent')}, not {wanted[name]}" for name in differ]
    wrong += [f"{name} {version} is not in the lock" for name, version in found.items() if name not in wanted]
    assert not wrong, "; ".join(sorted(wrong))
    return {"python": sys.version.split()[0], "distributions": str(len(found))}


def check_files(expected):
    """Every installed file is the one that its wheel's RECORD names, by hash, and there is no other.

    Wheels that do not know each other may bring a file of the same name; then it is that of one of them, and named. Where one
    requires the other, it is that of the one that does.
    """
    claims, needs = {}, {}
    for distribution in metadata.distributions(path=[str(SITE)]):
        always = [text for text in distribution.requires or () if "extra ==" not in text]
        needs[normal(distribution.metadata["Name"])] = {normal(re.match(r"[\w.-]+", text)[0]) for text in always}
        for file in distribution.files:
            claims.setdefault(Path(os.path.normpath(SITE / file)), []).append((distribution, file.hash))
    wrong, shared = [], []
    for path, claimed in claims.items():
        required = set().union(*(needs[normal(one.metadata["Name"])] for one, _ in claimed))
        claimed = [(one, hash_) for one, hash_ in claimed if normal(one.metadata["Name"]) not in required] or claimed
        # Bytecode that a wheel brings was compiled again, and is compared with its source instead.
        hashes = [hash_ for _, hash_ in claimed if hash_ is not None and "__pycache__" not in path.parts]
        owners = " and ".join(f"{one.metadata['Name']} {one.version}" for one, _ in claimed)
        try:
            found = [base64.urlsafe_b64encode(hashlib.new(one.mode, path.read_bytes()).digest()).rstrip(b"=") for one in hashes]
        except OSError as error:
            wrong.append(f"{path}: {error.strerror}")
            continue
        same = [one.value == text.decode() for one, text in zip(hashes, found, strict=True)]
        if same and not any(same):
            wrong.append(f"{path} is not the file of {owners}")
        elif not all(same):
            shared.append(f"{path.name} of {owners}")
    for folder, folders, files in os.walk(PREFIX):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            path = Path(folder, name)
            if path not in claims and not VENV_FILES.match(str(path.relative_to(PREFIX))):
                wrong.append(f"{path} belongs to no wheel")
    assert not wrong, f"{len(wrong)}: " + "; ".join(wrong[:5])
    return {"checked files": str(len(claims)), "several wheels bring": "; ".join(shared) or "nothing"}


def check_bytecode(expected):
    """Compiled modules are those of their sources: Python does not look again, so somebody has to."""
    import importlib.util

    count, wrong = 0, []
    for path in SITE.rglob("__pycache__/*.pyc"):
        source = path.parents[1] / COMPILED.sub(".py", path.name)
        head = path.read_bytes()[:16]
        if not source.is_file() or head[8:16] != importlib.util.source_hash(source.read_bytes()):
            wrong.append(str(path))
        count += 1
    assert not wrong, f"{len(wrong)} are not those of their source: " + "; ".join(wrong[:5])
    return {"bytecode files": str(count)}


def check_requirements(expected):
    """Every requirement of every distribution is met, those apart that the image leaves out or overrides on purpose."""
    from packaging.requirements import Requirement

    wrong = []
    left_out = {normal(name) for name in expected["left_out"]}
    overridden = {normal(name) for name in expected["overridden"]}
    for distribution in metadata.distributions(path=[str(SITE)]):
        for text in distribution.requires or ():
            need = Requirement(text)
            if normal(need.name) in left_out or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            try:
                version = metadata.version(need.name)
            except metadata.PackageNotFoundError:
                wrong.append(f"{distribution.metadata['Name']} needs {need}, which is absent")
                continue
            if normal(need.name) not in overridden and not need.specifier.contains(version, prereleases=True):
                wrong.append(f"{distribution.metadata['Name']} needs {need}, here {version}")
    assert not wrong, "; ".join(sorted(wrong))
    return {"left out": ", ".join(sorted(left_out)) or "nothing", "overridden": ", ".join(sorted(overridden)) or "nothing"}


def check_no_toolchain(expected):
    """No compiler stayed behind, but for those that the suite allows with a reason."""
    places = [*os.environ["PATH"].split(":"), TOOLKIT / "bin", *SITE.glob("nvidia/**/bin")]
    found = {str(Path(place).resolve() / tool) for place in places for tool in TOOLS if Path(place, tool).exists()}
    reasons = {
        path: entry["reason"]
        for path in found
        for entry in expected["allowed"]["tools"]
        for pattern in entry["paths"]
        if fnmatch.fnmatch(path.removeprefix(f"{SITE}/"), pattern)
    }
    assert found == set(reasons), ", ".join(sorted(found - set(reasons)))
    left = [path for path in (TOOLKIT, *BUILD) if path.exists()]
    assert not left, ", ".join(map(str, left))
    return {f"compiler {path}": reason for path, reason in sorted(reasons.items())}


def check_no_secrets(expected):
    """No index setting, credential or proxy, in the environment or in files where programs look for them."""
    names = [name for name in os.environ if SECRET.search(name)]
    assert not names, f"environment: {', '.join(names)}"
    places = [ETC, *HOMES, PREFIX]
    found = [str(place / name) for place in places for name in SETTINGS if os.path.lexists(place / name)]
    found += [
        str(path)
        for home in HOMES
        for name in (".docker", ".ssh", ".config", ".cache")
        if os.access(home, os.X_OK)
        for path in [home / name, *(home / name).rglob("*")]
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir())
    ]
    assert not found, ", ".join(found)
    pointing = [str(path) for path in SITE.glob("*.dist-info/direct_url.json")]
    assert not pointing, f"these say where a wheel came from: {', '.join(pointing)}"
