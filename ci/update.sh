#!/usr/bin/env bash
# Recipes of upstream releases that are newer than those of this checkout.
#   ci/update.sh make DIRECTORY      make and check them; DIRECTORY gets the recipes and the text of a pull request, or stays empty
#   ci/update.sh propose DIRECTORY   open the pull request; DRY_RUN=1 prints its commands. Requires gh, and GH_TOKEN
# `make` runs the kernel generators of releases that nobody has reviewed: run it without secrets and without write access.
set -euo pipefail
action=$1
mkdir -p "$2"
directory=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."

make_recipes() {
  local data scratch before
  data=${SM120KIT_DATA:-$PWD}
  scratch=$(mktemp -d)
  sm120kit recipe update --json > "$scratch/newer.json" || [ $? = 1 ]
  python3 - "$scratch/newer.json" > "$scratch/newer" << 'END'
import json, sys

for each in json.load(open(sys.argv[1])):
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
    printf '\n## %s %s\n\n```\n' "$engine" "$version" >> "$directory/body.md"
    if sm120kit recipe new "$engine@$version" >> "$directory/body.md" 2> "$scratch/errors"; then
      echo "$engine-$version" >> "$directory/releases"
    else
      cat "$scratch/errors" >> "$directory/body.md"
    fi
    echo '```' >> "$directory/body.md"
  done < "$scratch/newer"
  printf '\n## Patches on these releases\n\n```\n' >> "$directory/body.md"
  while read -r engine _ newest; do echo "$engine $newest"; done < "$scratch/newer" | sort -u | while read -r engine newest; do
    projects=$engine
    [ "$engine" != flashinfer ] || projects="cutlass flashinfer"
    for project in $projects; do
      [ ! -e "$data/patches/$project/series" ] || sm120kit patch drift "$project" --since "$newest" >> "$directory/body.md" || true
    done
  done
  echo '```' >> "$directory/body.md"
  if [ -e "$directory/releases" ]; then
    sm120kit recipe check > "$scratch/check" && sm120kit recipe lock --check $(cat "$directory/releases") >> "$scratch/check"
    mkdir -p "$directory/engines"
    for file in "$data"/recipes/engines/*; do
      grep -qxF "$(basename "$file")" <<< "$before" || cp "$file" "$directory/engines/"
    done
    { printf '\n## Checks without a GPU\n\n```\n'; cat "$scratch/check"; echo '```'; } >> "$directory/body.md"
  fi
}

propose() {
  local run=() title branch
  [ -z "${DRY_RUN:-}" ] || run=(echo +)
  if [ ! -e "$directory/releases" ]; then
    echo "nothing to propose"
    return
  fi
  title="recipes: add $(paste -sd, "$directory/releases" | sed 's/,/, /g')"
  branch=recipes/$(paste -sd+ "$directory/releases")
  if [ -z "${DRY_RUN:-}" ] && gh pr view "$branch" > /dev/null 2>&1; then
    echo "there is a pull request from $branch"
    return
  fi
  "${run[@]}" cp -r "$directory/engines/." recipes/engines/
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
