# Install the wheels of /context/$1 below /overlay, as they will lie in the image, with times that say nothing of the build.
#
# Bytecode carries the hash of its source, not a time, which is why nothing but compileall may write it. Packages carry files for
# other Pythons, which compileall counts as failures.
set -eu
export PYTHONDONTWRITEBYTECODE=1
mkdir -p /overlay/opt/venv/lib
PYTHONPATH=$(echo /context/tools/pip-*.whl) /opt/venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --root-user-action ignore --no-warn-script-location --no-cache-dir --no-index --no-deps --no-compile --require-hashes \
    --root /overlay --find-links "/context/$1" --requirement "/context/$1/requirements.txt"
/opt/venv/bin/python -m compileall -qq -j 0 -s /overlay -p / --invalidation-mode unchecked-hash /overlay/opt/venv/lib || :
find /overlay -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH}" {} +
