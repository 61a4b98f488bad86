# Install the wheels of /context/$1 below /overlay, as they will lie in the image, with times that say nothing of the build.
#
# Bytecode carries the hash of its source, not a time, which is why nothing but compileall may write it. Packages carry files for
# other Pythons, which compileall counts as failures. What replaces files of a wheel that it requires is installed once more.
set -eu
export PYTHONDONTWRITEBYTECODE=1
mkdir -p /overlay/opt/venv/lib
install_wheels() {
    PYTHONPATH=$(echo /context/tools/pip-*.whl) /opt/venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --root-user-action ignore --no-warn-script-location --no-cache-dir --no-index --no-deps --no-compile --require-hashes \
        --root /overlay --find-links "$1" --requirement "$2"
}
install_wheels "/context/$1" "/context/$1/requirements.txt"
/opt/venv/bin/python /context/tools/again.py /overlay/opt/venv/lib/python3*/site-packages "/context/$1/requirements.txt" > /tmp/again.txt
if [ -s /tmp/again.txt ]; then
    install_wheels "/context/$1" /tmp/again.txt
fi
rm /tmp/again.txt
if [ -f /context/tools/leave_out.txt ]; then
    /opt/venv/bin/python /context/tools/leave_out.py /overlay/opt/venv/lib/python3*/site-packages /context/tools/leave_out.txt
fi
/opt/venv/bin/python -m compileall -qq -j 0 -s /overlay -p / --invalidation-mode unchecked-hash /overlay/opt/venv/lib || :
find /overlay -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH}" {} +
