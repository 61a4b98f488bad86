# Add the user who runs programs in the image, with a home of its own for caches, below /overlay.
set -eu
mkdir -p /overlay/etc
cp /etc/passwd /etc/group /overlay/etc/
echo 'sm120kit:x:1000:1000:sm120kit:/home/sm120kit:/usr/sbin/nologin' >> /overlay/etc/passwd
echo 'sm120kit:x:1000:' >> /overlay/etc/group
install --directory --owner 1000 --group 1000 /overlay/home/sm120kit
find /overlay -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH}" {} +
