"""Checks that a container cannot run on itself: size, history, entrypoint, device code."""

import re
from collections.abc import Iterator, Sequence

from sm120kit import engines
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput, BadRecord
from sm120kit.core.outside import parse_json
from sm120kit.core.record_files import read_record
from sm120kit.images import _b12x as b12x
from sm120kit.images._wheel_layers import VENV
from sm120kit.images.checks._expected_image import ExpectedImage
from sm120kit.images.checks.quick import Baseline
from sm120kit.images.image_records import SERVED_PROMPT, Check, CheckResult, Image, Reported
from sm120kit.images.local_images import LocalImages
from sm120kit.kernels.cubin import matching, read


def _device_code(image: Image, site: str, expected: ExpectedImage, store: LocalImages) -> Iterator[Reported]:
    """Check archs and kernels of all FlashInfer modules compiled ahead of time, read from their cubins."""
    if not expected.modules:
        return
    problems: list[str] = []
    archs: set[str] = set()
    count = 0
    files = store.files(image.id, f"{site}/flashinfer/data/aot")
    if not files:
        problems.append("flashinfer/data/aot is missing")
    libraries = [path for name, path in sorted(files.items()) if name.endswith(".so")]
    for library in libraries:
        cubins = read(library)
        archs |= {cubin.arch for cubin in cubins}
        count += sum(len(cubin.kernels) for cubin in cubins)
        for pattern, least in expected.kernels.get(library.stem, {}).items():
            matches = len(matching(pattern, cubins))
            if matches < least:
                problems.append(f"{library.stem}: {matches} kernels match {pattern}, at least {least} are expected")
    missing = sorted({*expected.modules} - {library.stem for library in libraries})
    problems += [f"{name} is missing" for name in missing]
    problems += _foreign(archs, expected)
    facts = {"archs": ", ".join(sorted(archs)), "kernels": str(count)}
    yield Check.judged("flashinfer", "device_code", *problems), facts


def b12x_code(image: Image, store: LocalImages) -> Reported:
    """Check the kernels of b12x that were compiled into the image: as recorded, for sm_120a, with FP4 tensor core instructions
    unless 1.5.1 multiplies a few tokens without, and with at most the shared memory of SM120."""
    problems: list[str] = []
    record, recorded = f"{b12x.DIRECTORY}/kernels.json", dict[str, b12x.Entry]()
    files = store.files(image.id, f"{b12x.DIRECTORY}/entries")
    entries = {name: path for name, path in files.items() if name.endswith(".o")}
    if not (listed := store.file(image.id, record)):
        problems.append(f"{record} is missing")
    else:
        try:
            recorded = read_record(dict[str, b12x.Entry], listed, "a list of kernels of b12x")
        except BadRecord as error:
            problems.append(str(error).replace(str(listed), record))
    if {*entries} != {*recorded}:
        problems.append(f"{len({*entries} ^ {*recorded})} entries are not those of {b12x.DIRECTORY}/kernels.json")
    count = multiplied = 0
    for path, entry in sorted(entries.items()):
        try:
            kernels = [kernel for cubin in read(entry) for kernel in cubin.kernels]
        except BadInput as error:
            problems.append(f"{path}: {error.message}")
            continue
        count += len(kernels)
        multiplied += sum(kernel.fp4_mma > 0 for kernel in kernels)
        compiled = recorded.get(path)
        if compiled is None or file_sha256(entry) != compiled.sha256:
            problems.append(f"{path} is not the file that was compiled")
        elif why := compiled.too_big(kernels):
            problems.append(f"{path}: {why}")
        plain = compiled is not None and all(launch.kernel == b12x.WITHOUT_MMA for launch in compiled.launches)
        if not kernels or any(kernel.arch != b12x.ARCH or not (plain or kernel.fp4_mma) for kernel in kernels):
            problems.append(f"{path} has a kernel for another arch than {b12x.ARCH}, or without FP4 instructions")
    if not recorded and not problems:
        problems.append(f"{b12x.DIRECTORY}/kernels.json lists no kernel")
    check = Check.judged("engine", "b12x_code", *problems[:5])
    if problems:
        return check, {}
    largest = max(launch.shared_bytes for entry in recorded.values() for launch in entry.launches)
    shared = f"at most {largest:,} bytes of dynamic shared memory"
    facts = {"b12x kernels": f"{count} for {b12x.ARCH}, {multiplied} with FP4 tensor core instructions, {shared}"}
    return check, facts


def rebuilt(image: Image, site: str, expected: ExpectedImage, store: LocalImages) -> Iterator[Reported]:
    """Check the replaced files of repacked wheels: sha256 as recorded, modules with device code for SM12x only."""
    repacked = {name: version for name, version in sorted(expected.distributions.items()) if "+sm120kit." in version}
    repacked.pop("flashinfer-python", None)
    if not repacked:
        return
    problems: list[str] = []
    replaced: dict[str, str] = {}
    for name, version in repacked.items():
        record = store.file(image.id, f"{site}/{name.replace('-', '_')}-{version}.dist-info/sm120kit.json")
        if not record:
            problems.append(f"{name} {version} does not record its replaced files")
            continue
        try:
            hashes = parse_json(record.read_text())["replaced"]
            recorded: dict[str, str] = {member: hashes[member]["here"] for member in sorted(hashes)}
        except (ValueError, LookupError, TypeError):
            recorded = {}
        if not recorded:
            problems.append(f"{name} {version} records no replaced file")
        replaced |= recorded
    count = 0
    for member, sha256 in replaced.items():
        file = store.file(image.id, f"{site}/{member}")
        if (file_sha256(file) if file else "") != sha256:
            problems.append(f"{member} is not the file that was built")
        elif file and file.suffix == ".so":
            cubins = read(file)
            count += sum(len(cubin.kernels) for cubin in cubins)
            problems += [f"{member}: {problem}" for problem in _foreign({cubin.arch for cubin in cubins}, expected)]
    facts = {"replaced files": ", ".join(replaced), "kernels rebuilt": str(count)} if replaced else {}
    yield Check.judged("engine", "rebuilt", *problems), facts


def _foreign(archs: set[str], expected: ExpectedImage) -> list[str]:
    """Problems with the archs of device code: each that was not requested."""
    # A family target is listed without its letter by some toolkits, see sm120kit.kernels.cubin.
    requested = {arch.rstrip("af") for arch in expected.archs}
    foreign = sorted(arch for arch in archs if arch.rstrip("af") not in requested and not arch.startswith("compute_"))
    return [f"device code for {arch}, which was not requested" for arch in foreign]


NEEDS_GPU = {
    "flashinfer": ("kernels", "needs an SM12x GPU, on which `sm120kit verify kernels` compares them; unverified on SM120"),
    "engine": (SERVED_PROMPT, "needs an SM12x GPU: `sm120kit verify image IMAGE --serve CONFIG`; unverified on SM120"),
}
"""Checks that are not run, because the container has no GPU: by suite, name and reason."""

_SECRET = re.compile(r"(?i)(token|secret|password|api_?key|index[_-]url|find[_-]links=|https?_proxy|://[^/\s]+:[^/\s]+@)")


def outside(image: Image, expected: ExpectedImage, store: LocalImages, baseline: Baseline | None) -> Iterator[Reported]:
    """Run the checks that a container cannot run on itself: size, history, entrypoint, device code.

    Device code and entrypoint of an image that differs from ``baseline`` in Python files only are not checked.
    """
    limit = engines.of_recipe(expected.kind).size_limit_bytes
    size = f"{image.bytes / 2**20:.0f} MiB"
    too_large = [f"{size} unpacked, at most {limit / 2**20:.0f} MiB are allowed"] if image.bytes > limit else []
    yield Check.judged("base", "size", *too_large), {"size": size}
    leaks = "; ".join(suspect_steps(store.history(image.id), image, expected))[:200]
    yield Check.judged("base", "history", *([f"a setting or secret in the history: {leaks}"] if leaks else [])), {}
    site = f"/{VENV}/lib/python{image.labels.get('sm120kit.python', '')}/site-packages"
    if baseline:
        for left in baseline.left("flashinfer/device_code", "engine/b12x_code", "engine/entrypoint"):
            yield left, {}
    else:
        yield from _device_code(image, site, expected, store)
        if expected.b12x:
            yield b12x_code(image, store)
        if expected.serve:
            yield _entrypoint(image, expected, store)
    yield from rebuilt(image, site, expected, store)
    for suite, (name, reason) in NEEDS_GPU.items():
        yield Check(suite, name, CheckResult.NOT_RUN, reason), {}


def suspect_steps(history: Sequence[str], image: Image, expected: ExpectedImage) -> list[str]:
    """The steps in the history of an image that show a setting or a secret. Names of wheels such as tokenizers do not."""
    wheels = f"LABEL sm120kit.wheels={image.labels.get('sm120kit.wheels')}"
    layers = {f"sm120kit: {name} {version}" for name, version in expected.distributions.items()}
    return [step for step in history if _SECRET.search(step) and step not in layers and not step.endswith(wheels)]


def _entrypoint(image: Image, expected: ExpectedImage, store: LocalImages) -> Reported:
    """Check that the entrypoint ends with the recipe's command, and prints help and version in a container without a GPU."""
    problems: list[str] = []
    argv = list(store.settings(image.id).get("Entrypoint") or ())
    if argv[-len(expected.serve) :] != list(expected.serve):
        problems.append(f"it is {argv}, the recipe serves with {' '.join(expected.serve)}")
    version = expected.distributions.get(expected.kind, "")
    for option, text in (("--help", expected.serve[0]), ("--version", version)):
        result = store.run(image.id, [*argv, option], {}) if argv else None
        if result is None or result.code != 0 or text not in result.stdout:
            problems.append(f"{option} does not print {text}: {result.stderr.strip()[-200:] if result else 'no entrypoint'}")
    return Check.judged("engine", "entrypoint", *problems), {}
