"""``sm120kit recipe``: list, show, check and lock recipes."""

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import canonicalize_name

from sm120kit import recipes
from sm120kit.cli.options import DebianSources, Json, Sources, argument, lockable_names, option, patches_root, recipe_names
from sm120kit.core import console
from sm120kit.core.data_roots import origin, user_repository
from sm120kit.core.errors import Mismatch, NotFound, did_you_mean
from sm120kit.recipes import bases, lockfile
from sm120kit.recipes.added_files import read_added
from sm120kit.recipes.target import resolve, resolve_each
from sm120kit.sources.releases import Releases, Withdrawals


def list_(json: Json = False) -> None:
    """List the recipes.

    In a repository of `sm120kit init`, also where each comes from, and what overrides what.
    """
    listed = [recipes.load(name) for name in recipes.names()]
    if json:
        console.json_data([recipe.model_dump(mode="json") | {"from": _origin(recipe.name)} for recipe in listed])
        return
    own = bool(user_repository())
    rows = ((r.name, *[_origin(r.name)] * own, r.made_from, " ".join(r.archs), " ".join(r.groups), r.summary) for r in listed)
    console.table(("recipe", *["from"] * own, "made from", "archs", "kernel groups", "summary"), rows)


def _origin(name: str) -> str:
    """Where a recipe comes from, and whether a built-in one is locked in the user's repository."""
    path = recipes.path_of(name)
    where, lock = origin(recipes.KIND, path), recipes.lock_path(path)
    return f"{where}, own lockfile" if where == "built-in" and lock.parent != path.parent else where


def check(
    names: Annotated[
        list[str] | None, argument("RECIPE", "Recipes, by name or file; default: all.", autocompletion=recipe_names)
    ] = None,
) -> None:
    """Validate recipes.

    All problems of a file are reported at once; then an added file that is missing or has another sha256. Of recipes
    that a repository of `sm120kit init` has or has locked, also prints the patches that were added, changed or removed since,
    such as by an upgrade of sm120kit.
    """
    own = user_repository()
    if own and next((own / "recipes/models").glob("*.toml"), None):
        console.warn(f"{own}/recipes/models is no longer read: `sm120kit plan` computes with a model's config.json")
    for name in names or recipes.names():
        file, recipe = recipes.load_with_path(name)
        read_added(recipe)
        console.data(f"ok {recipe.name}")
        for change in _changes_since_locked(recipes.lock_path(file)):
            console.data(f"  since it was locked: {change}")


def _changes_since_locked(path: Path) -> list[str]:
    own = user_repository()
    if own is None or not path.is_relative_to(own) or not path.is_file():
        return []
    return list(lockfile.series_changes(lockfile.read(path), patches_root()))


def _require_locked(distributions: AbstractSet[str], names: list[str]) -> None:
    """Require that these recipes exist, and that a lockfile of them has each distribution.

    Raises:
        NotFound: one does not, or none has one.
    """
    paths = [recipes.lock_path(recipes.load_with_path(name)[0]) for name in names]
    closures = (closure for path in paths if distributions and path.is_file() for closure in lockfile.read(path).closures)
    locked = {wheel.name for closure in closures for wheel in closure.wheels}
    if unknown := sorted(distributions - locked):
        message = f"no lockfile of these recipes has the distribution {unknown[0]}{did_you_mean(unknown[0], locked)}"
        raise NotFound(message, "--upgrade-package takes the name of a locked wheel; --upgrade resolves all of them")


_ANOTHER = "lock another version: sm120kit recipe lock RECIPE --upgrade-package NAME"


def lock(
    names: Annotated[
        list[str] | None, argument("RECIPE", "Recipes by name or file, or bases; default: all.", autocompletion=lockable_names)
    ] = None,
    check: Annotated[
        bool,
        option(
            "--check",
            "Write nothing; fail if a lockfile is outdated, or a locked file is yanked, replaced or no longer listed.",
        ),
    ] = False,
    upgrade: Annotated[
        bool, option("--upgrade", "Lock the newest wheels that fit instead of the versions in the lockfile.")
    ] = False,
    upgrade_package: Annotated[
        list[str] | None, option("--upgrade-package NAME", "Lock the newest wheel of this distribution that fits; repeatable.")
    ] = None,
    *,
    sources: Sources,
    debian: DebianSources,
    json: Json = False,
) -> None:
    """Lock sources, patches and wheels of recipes by hash.

    Of a base such as debian-12, the Debian packages are locked. Each lockfile is written next to its recipe or base. Files that
    the package index has yanked, replaced or no longer lists are reported.
    """
    if check and (upgrade or upgrade_package):
        raise typer.BadParameter("--check writes nothing, so --upgrade and --upgrade-package have no effect")
    options = sources.run_options(debian=debian)
    renewed = {*map(canonicalize_name, upgrade_package or ())}
    withdrawals = None if options.origin.offline else Withdrawals(Releases(options.origin))
    withdrawn: list[str] = []
    ids = {}
    of_bases = [name for name in names or bases.names() if name in bases.names()]
    every = names or [*recipes.names(recipes.FlashInferRecipe), *recipes.names(recipes.EngineRecipe)]
    chosen = [name for name in every if name not in of_bases]
    if not check:
        _require_locked(renewed, chosen)
    for name in of_bases:
        bases.verify(bases.load(name)) if check else bases.lock(bases.load(name), options, upgrade=upgrade)
        ids[name] = bases.lock_id(name)
        if not json:
            console.data(f"{'ok' if check else 'locked'} {name}: build id {ids[name]}")
    # Locking the FlashInfer recipe of an engine changes the lock that the engine's refers to: only checks share targets.
    for target in resolve_each(chosen, options) if check else (resolve(name, options) for name in chosen):
        console.info(f"{'checking' if check else 'locking'} {target.recipe.name}")
        lock = target.lock if check else lockfile.create(target, upgrade=upgrade, renewed=renewed)
        if not check:
            console.info(f"wrote {target.lock_path}")
        if withdrawals:
            files = (*(wheel for closure in lock.closures for wheel in closure.wheels), *(each.pin for each in target.sources))
            withdrawn += (f"{target.recipe.name}: {line}" for line in withdrawals.of(files))
        recipe, build_id = str(lock.recipe["name"]), lockfile.build_id(lock)
        ids[recipe] = build_id
        if not json:
            console.data(f"{'ok' if check else 'locked'} {recipe}: build id {build_id}")
    if withdrawn:
        problem = "\n  ".join([f"the package index has withdrawn {len(withdrawn)} locked files:", *withdrawn])
        if check:
            raise Mismatch(problem, _ANOTHER)
        console.warn(f"{problem}\n  {_ANOTHER}")
    if json:
        console.json_data(ids)
