#!/usr/bin/env bash
# Recipes of upstream releases that are newer than those of this checkout.
#   ci/update.sh make DIRECTORY      make and check them; DIRECTORY gets the recipes, their names in `releases` (empty if there are none)
#                                    and the text of a pull request
#   ci/update.sh propose DIRECTORY   open the pull request; DRY_RUN=1 prints its commands. Requires gh, and GH_TOKEN
# `make` runs the kernel generators of releases that nobody has reviewed: run it without secrets and without write access. They can write
# anything to DIRECTORY: `propose` adds only new files with names of recipes.
set -euo pipefail
RELEASE='(flashinfer|vllm|sglang)-[0-9]+(\.[0-9A-Za-z]+)*(\+[0-9A-Za-z.]+)?'
action=$1
mkdir -p "$2"
directory=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."

# Print a section with a literal text, which cannot end it.
section() {
  printf '\n## %s\n\n' "$1"
  sed 's/^/    /'
}

make_recipes() {
  local data scratch before
  : > "$directory/releases" # also without releases: an artifact has at least one file
  data=${SM120KIT_DATA:-$PWD}
  scratch=$(mktemp -d)
  sm120kit recipe update --json > "$scratch/newer.json" || [ $? = 1 ]
  python3 - "$scratch/newer.json" > "$scratch/newer" << 'END'
import json, sys

for each in (each for each in json.load(open(sys.argv[1])) if "engine" in each):
    print(each["engine"], each["version"], each["newest_recipe"].partition("-")[2])
END
  if [ ! -s "$scratch/newer" ]; then
    echo "no release is newer than the recipes"
    return
  fi
  before=$(ls "$data/recipes/engines")
  cat > "$directory/body.md" << 'END'
Recipes of upstream releases, made by `ci/update.sh`. Nothing has run on a GPU. Before merging: record the options of the parser
(`nox -s arguments -- RECIPE`), and add a recipe of vLLM or SGLang to the matrix of `.github/workflows/images.yml`.
END
  while read -r engine version _; do
    if sm120kit recipe new "$engine@$version" > "$scratch/made" 2> "$scratch/errors" < /dev/null; then
      echo "$engine-$version" >> "$directory/releases"
    else
      cat "$scratch/errors" >> "$scratch/made"
    fi
    section "$engine $version" < "$scratch/made" >> "$directory/body.md"
  done < "$scratch/newer"
  if [ -s "$directory/releases" ]; then
    { xargs sm120kit patch status < "$directory/releases" || true; } | section "Patches on these releases" >> "$directory/body.md"
    sm120kit recipe check > "$scratch/check"
    xargs sm120kit recipe lock --check < "$directory/releases" >> "$scratch/check"
    mkdir -p "$directory/engines"
    for file in "$data"/recipes/engines/*; do
      grep -qxF "$(basename "$file")" <<< "$before" || cp "$file" "$directory/engines/"
    done
    section "Checks without a GPU" < "$scratch/check" >> "$directory/body.md"
  fi
}

propose() {
  local run=() title branch file
  [ -z "${DRY_RUN:-}" ] || run=(echo +)
  if [ ! -s "$directory/releases" ]; then
    echo "nothing to propose"
    return
  fi
  if grep -qvxE "$RELEASE" "$directory/releases"; then
    echo "refused: a line of $directory/releases is no release" >&2
    exit 1
  fi
  for file in "$directory"/engines/*; do
    if [[ ! $(basename "$file") =~ ^$RELEASE\.(toml|lock\.json)$ || -L $file || ! -f $file || -e recipes/engines/$(basename "$file") ]]; then
      echo "refused: $file is no new recipe" >&2
      exit 1
    fi
  done
  title="recipes: add $(paste -sd, "$directory/releases" | sed 's/,/, /g')"
  branch=recipes/$(paste -sd+ "$directory/releases")
  if [ ${#branch} -gt 200 ]; then # GitHub's limit for a title is 256, git's for a part of a branch 255
    title="recipes: add $(wc -l < "$directory/releases") releases"
    branch=recipes/$(sha256sum < "$directory/releases" | cut -c 1-16)
  fi
  if [ -z "${DRY_RUN:-}" ] && gh pr view "$branch" > /dev/null 2>&1; then
    echo "there is a pull request from $branch"
    return
  fi
  if [ "$(wc --chars < "$directory/body.md")" -gt 65000 ]; then # GitHub's limit is 65536
    python3 - "$directory/body.md" << 'END'
import pathlib, sys

body = pathlib.Path(sys.argv[1])
body.write_text(body.read_text()[:60000] + "\n\nThe text is cut here; the artifact of the workflow has the rest.\n")
END
  fi
  "${run[@]}" cp "$directory"/engines/* recipes/engines/
  "${run[@]}" git switch --create "$branch"
  "${run[@]}" git add recipes/engines
  "${run[@]}" git -c user.name="sm120kit CI" -c user.email=ci@localhost commit --message "$title"
  "${run[@]}" git push --force origin "$branch"
  "${run[@]}" gh pr create --head "$branch" --title "$title" --body-file "$directory/body.md"
}

case $action in
  make) make_recipes ;;
  propose) propose ;;
  *)
    echo "expected make or propose, not '$action'" >&2
    exit 2
    ;;
esac
