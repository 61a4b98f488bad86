#!/usr/bin/env bash
# Create the environment of a user; source this file in a checkout. Changes to a clone of it (committed files only) and creates a virtual
# environment of the distribution's own Python (or of $PYTHON), without a CUDA toolkit on PATH. Run commands by `as_user`, without
# privileges, or by `as_root`.
set -euo pipefail

minor=$(sed -n 's/^requires-python = ">=3\.\([0-9]*\)"$/\1/p' pyproject.toml)
suits() { "$1" -c "import ensurepip, sys; sys.exit(sys.version_info < (3, $minor))" 2> /dev/null; }

python=${PYTHON:-/usr/bin/python3}
need=()
command -v git > /dev/null || need+=(git)
command -v c++ > /dev/null || need+=(g++)
if [ "$python" = /usr/bin/python3 ]; then
  suits "$python" || need+=(python3-venv)
  compgen -G '/usr/include/python3*/Python.h' > /dev/null || need+=(python3-dev)
fi
if [ "$(id -u)" = 0 ]; then
  # Tests start their own container daemon, registry and sshd, others need a sandbox; without the programs they are skipped, with
  # the reason.
  command -v dockerd > /dev/null || need+=(docker.io)
  command -v docker-registry > /dev/null || need+=(docker-registry)
  command -v debootstrap > /dev/null || need+=(debootstrap)
  command -v skopeo > /dev/null || need+=(skopeo)
  command -v bwrap > /dev/null || need+=(bubblewrap)
  command -v sshd > /dev/null || need+=(openssh-server)
  command -v rsync > /dev/null || need+=(rsync)
  if [ ${#need[@]} -gt 0 ]; then
    apt-get update -q && apt-get install -qy --no-install-recommends "${need[@]}"
  fi
elif [ ${#need[@]} -gt 0 ]; then
  echo "not installed: ${need[*]}" >&2
  exit 1
fi
suits "$python" || python=$(command -v python3)

# System directories on PATH, without those that contain a CUDA compiler.
PATH=
for directory in /usr/local/sbin /usr/local/bin /usr/sbin /usr/bin /sbin /bin; do
  [ -e "$directory/nvcc" ] || PATH=$PATH${PATH:+:}$directory
done
unset CUDA_HOME CUDA_PATH LD_LIBRARY_PATH PYTHONHOME PYTHONPATH VIRTUAL_ENV

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/home/.config"
export GIT_CONFIG_GLOBAL=$scratch/gitconfig # the clone, and perhaps this checkout, belong to another user
git config --file "$GIT_CONFIG_GLOBAL" safe.directory '*'
git clone --quiet "$PWD" "$scratch/checkout"
if [ -d ~/.config/pip ]; then cp -r ~/.config/pip "$scratch/home/.config/"; fi # settings of the package index

settings=(PATH="$scratch/venv/bin:$PATH" SM120KIT_STATE="$scratch/state")
if [ "$(id -u)" = 0 ]; then
  chown -R nobody: "$scratch"
  group=$(id -g nobody)
  as_user() {
    setpriv --reuid=nobody --regid="$group" --clear-groups env "${settings[@]}" HOME="$scratch/home" USER=nobody LOGNAME=nobody "$@"
  }
  # Uses the environments of as_user, and leaves no files in them that as_user cannot change.
  as_root() { env "${settings[@]}" SM120KIT_STATE="$scratch/root" PYTHONDONTWRITEBYTECODE=1 PYTEST_ADDOPTS="-p no:cacheprovider" "$@"; }
else
  as_user() { env "${settings[@]}" "$@"; }
  as_root() { echo "left out, needs root: $*"; }
fi

cd "$scratch/checkout"
as_user "$python" -m venv "$scratch/venv"
as_user pip install --quiet nox
echo "$(as_user python --version) as $(as_user id -un), nvcc: $(as_user which nvcc || echo none)"
