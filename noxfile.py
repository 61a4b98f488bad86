"""The one command surface for developers: ``nox`` runs what CI runs, ``nox -l`` lists the rest."""

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True


@nox.session
def lint(session: nox.Session) -> None:
    """Style and types."""
    session.install("-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Unit and integration tests; real git, compilers and sources, no GPU. Arguments go to pytest."""
    session.install("-e", ".[cuda,torch,kernels,docker,plot,serve,dev]")
    session.run("pytest", *session.posargs)


@nox.session
def arguments(session: nox.Session) -> None:
    """Ask engines' own argument parsers about the configurations, and record what they know. Arguments name recipes."""
    session.install("-e", ".")
    session.run("python", "tests/arguments/collect.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks: ratios and costs, with figures. Arguments name files below tests/bench."""
    session.install("-e", ".[cuda,torch,docker,dev]")
    for script in session.posargs or ["tests/bench/commands.py"]:
        session.run("python", script)
