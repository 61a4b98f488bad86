"""Commands of developers: ``nox`` runs lint and the tests for a pull request, ``nox -s slow`` all other tests."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

TESTED = "cuda,torch,kernels,docker,plot,serve,dev"
LAB = ("-e", "src/sm12x_lab")
"""The laboratory, a distribution of its own."""
INSTALLED_BY_CI = "docker"
"""Extras in CI jobs that build, check and publish images, see ci/install.sh."""
GROUPS = ("engines", "integration", "containers", "compilers", "lab")
"""Groups of slow tests, ordered by their value for their time."""


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, imports between packages, and spelling."""
    session.install("-e", ".[dev]", *LAB)
    _style(session)
    _types(session)


def _style(session: nox.Session) -> None:
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")


def _types(session: nox.Session) -> None:
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def tests(session: nox.Session) -> None:
    """Lint, integration tests with one small real case of each stage, and unit tests; no GPU. With arguments, only pytest."""
    session.install("--no-compile", "-e", f".[{TESTED}]", *LAB)  # most modules of torch and transformers are never imported
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    _style(session)
    with ThreadPoolExecutor(1) as beside:  # mypy takes as long as a hundred tests, and one core
        types = beside.submit(_types, session)
        # Three processes keep two cores busy, as many tests wait. Files run in the order of testpaths: by default xdist starts
        # those with one long test last, on one core.
        session.run("pytest", "-n3", "--dist=loadfile", "--no-loadscope-reorder")
        types.result()


@nox.session
def lab(session: nox.Session) -> None:
    """Tests of the laboratory, with its own requirements instead of this project's extras. Arguments go to pytest."""
    session.install("-e", ".", "-e", "src/sm12x_lab[test]")
    session.run("pytest", *(session.posargs or ["tests/lab"]))


@nox.session
def slow(session: nox.Session) -> None:
    """Slow tests: the named groups, or all. Options, such as --time-budget=SECONDS, go to pytest."""
    session.install("-e", f".[{TESTED}]", *LAB)
    groups = [argument for argument in session.posargs if not argument.startswith("-")] or GROUPS
    options = [argument for argument in session.posargs if argument.startswith("-")]
    session.run("pytest", *options, "--durations=20", *(f"tests/slow/{group}" for group in groups))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site in build/html; a broken link fails. With --serve, serve it and rebuild it on changes."""
    session.install("-e", ".[docs]", *LAB)  # the reference has its commands
    session.run("python", "ci/docs_source.py")
    session.run("zensical", *(["serve"] if "--serve" in session.posargs else ["build", "--clean", "--strict"]))
    loads = [page for page in Path("build/html").rglob("*.html") if 'src="http' in page.read_text()]
    if loads:
        session.error(f"pages load files from elsewhere: {', '.join(map(str, loads))}")


@nox.session(reuse_venv=False)
def package(session: nox.Session) -> None:
    """Build sdist and wheel of both distributions, install the wheels and nothing else, and run them outside the checkout."""
    dist = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.install("build")
    for source in (".", "src/sm12x_lab"):
        session.run("python", "-m", "build", "--outdir", dist, source, silent=True)
    session.install(*dist.glob("sm120kit-*.whl"))
    session.chdir(dist)
    session.env["PYTHONPATH"] = ""  # not the checkout
    for command in ("--version", "recipe check", "config check", "patch check", "tiles --help", "build flashinfer --to patch"):
        session.run("sm120kit", *command.split(), silent=True)
    session.install(*dist.glob("sm12x_lab-*.whl"))
    for command in ("sm120kit verify run --help", "sm12x-lab --version", "sm12x-lab run --help"):
        session.run(*command.split(), silent=True)


@nox.session
def lock(session: nox.Session) -> None:
    """Write ci/requirements.txt: hashes of everything that CI with secrets installs. --upgrade, --upgrade-package=NAME."""
    session.install("uv")
    requires = Path(session.create_tmp()) / "build.in"
    requires.write_text("\n".join(nox.project.load_toml()["build-system"]["requires"]))
    options = ["--universal", "--python-version=3.11", "--generate-hashes"]
    options += ["--no-header", "--no-annotate", "--no-emit-index-url"]
    extras = [f"--extra={name}" for name in INSTALLED_BY_CI.split(",")]
    session.run(
        *("uv", "pip", "compile", *options, *extras, "--output-file=ci/requirements.txt"),
        *(*session.posargs, "pyproject.toml", str(requires)),
        silent=True,
    )


@nox.session
def arguments(session: nox.Session) -> None:
    """Record the options of engines' own argument parsers, and their answers to configurations. Arguments name recipes."""
    session.install("-e", ".")
    session.run("python", "tests/arguments/collect.py", *session.posargs)


@nox.session
def backends(session: nox.Session) -> None:
    """Record the back-ends that engines select on SM12x for configurations: 10 GB of downloads each. Arguments name recipes."""
    session.install("-e", ".")
    session.run("python", "tests/arguments/backends.py", *session.posargs)


@nox.session
def kv_specs(session: nox.Session) -> None:
    """Record vLLM's own KV cache specifications, or the pools of SGLang: 10 GB of downloads, up to an hour."""
    session.install("-e", ".")
    session.run("python", "tests/arguments/kv_specs.py", *session.posargs)


@nox.session
def plans(session: nox.Session) -> None:
    """Record plans of repositories of the Hub, and what vLLM or a named recipe selects and needs: 10 GB of downloads."""
    session.install("-e", ".")
    session.run("python", "tests/arguments/plans.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks: ratios and costs, with figures. Arguments name files below tests/bench."""
    session.install("-e", ".[cuda,torch,docker,dev]", *LAB)
    for script in session.posargs or ["tests/bench/commands.py"]:
        session.run("python", script)
