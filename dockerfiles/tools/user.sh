# Add the user who runs programs in the image, with a home of its own for caches, below /overlay. Any user of group 0 may write there, and
# all may pass /root, below which the pages of the engines mount caches.
set -eu
mkdir -p /overlay/etc
cp /etc/passwd /etc/group /overlay/etc/
echo 'sm120kit:x:1000:1000:sm120kit:/home/sm120kit:/usr/sbin/nologin' >> /overlay/etc/passwd
echo 'sm120kit:x:1000:' >> /overlay/etc/group
install --directory --owner 1000 --group 0 --mode 775 /overlay/home/sm120kit /overlay/home/sm120kit/.cache
install --directory --mode 711 /overlay/root
find /overlay -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH}" {} +
