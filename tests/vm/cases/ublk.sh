#: group: ublk
#: about: riser attaches a disk as /dev/ublkb3: file system, recovery after riser was killed under load
#: limit: 300
TRANSPORT=tcp
. /vm/iscsi.sh
# The directory used by the udev rule.
unset RISER_STATE_DIR
riser() { "$RISER_BIN/riser" --timeout 60s "$@"; }
ublk_clean() {
    set +e
    umount /tmp/mnt 2>/dev/null
    riser detach --force /dev/ublkb3 2>/dev/null
    iscsi_clean
}
# Prints the process that serves the device.
server() { riser list -o json | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["pid"])'; }
exits() {
    local want=$1 status=0
    shift
    riser "$@" || status=$?
    [ $status = "$want" ] || fail "riser $* exited with status $status, expected $want"
}

two_hosts
trap ublk_clean EXIT
modprobe -a ublk_drv ext4
iscsi_serve 128 10.99.0.2
URL=iscsi://10.99.0.2/$IQN/0

echo "--- a block device"
riser attach $URL --ublk=3
[ "$(blockdev --getsize64 /dev/ublkb3)" = $((128 << 20)) ] || fail "unexpected size"
[ "$(blockdev --getss /dev/ublkb3)" = 512 ] || fail "unexpected block size"
[ "$(cat /sys/block/ublkb3/queue/write_cache)" = "write back" ] || fail "the device has no write cache"
riser list
mkdir -p /run/udev/rules.d
sed "s|/usr/bin/riser|$RISER_BIN/riser|" "$RISER_ROOT/deploy/udev/60-riser.rules" >/run/udev/rules.d/60-riser.rules
udevadm test --action=add /sys/class/block/ublkb3 >"$KEEP/udev.txt" 2>&1 || true
grep -q "disk/by-path/ip-10.99.0.2:3260-iscsi-$IQN-lun-0" "$KEEP/udev.txt" || fail "the link in by-path is missing"
grep -q "disk/by-id/wwn-0x3" "$KEEP/udev.txt" || fail "the link in by-id is missing"
verify /dev/ublkb3 16m --bsrange=512-256k
head -c 4M /dev/urandom >/dev/ublkb3
blkdiscard --offset 1M --length 1M /dev/ublkb3
blkdiscard --zeroout --offset 2M --length 1M /dev/ublkb3
[ "$(dd if=/dev/ublkb3 bs=1M skip=1 count=2 status=none | tr -d '\0' | wc -c)" = 0 ] || fail "the blocks are not zero"

echo "--- a file system on the device, and the process is killed twice"
mkfs.ext4 -q -F /dev/ublkb3
mkdir -p /tmp/mnt
mount /dev/ublkb3 /tmp/mnt
exits 6 detach /dev/ublkb3
cp -a /usr/share/perl/5* /tmp/mnt/ 2>/dev/null || cp -a /usr/lib/python3 /tmp/mnt/
(cd /tmp/mnt && find . -type f -print0 | sort -z | xargs -0 sha256sum) >/tmp/sums
fio --name=files --directory=/tmp/mnt --size=4m --rw=randwrite --bs=4k --direct=1 --ioengine=libaio \
    --iodepth=16 --verify=crc32c --verify_fatal=1 --rate_iops=60 --output="$KEEP/fio-files.txt" &
LOAD=$!
for round in 1 2; do
    sleep 4
    kill -KILL "$(server)"
    sleep 2
    riser list
    riser list | grep -q waits || fail "the device did not wait for its process"
    # A different disk must be rejected.
    exits 6 attach "$URL?header_digest=crc32c" --ublk=3
    riser attach $URL --ublk=3
done
loaded
(cd /tmp/mnt && sha256sum --quiet -c /tmp/sums)
umount /tmp/mnt
fsck.ext4 -fn /dev/ublkb3

echo "--- detached, and attached again with an unused number"
riser detach /dev/ublkb3
[ ! -e /dev/ublkb3 ] || fail "the device was not removed"
riser attach $URL --ublk | tee /tmp/attached
device=$(grep -o '/dev/ublkb[0-9]*' /tmp/attached)
mount "$device" /tmp/mnt
(cd /tmp/mnt && sha256sum --quiet -c /tmp/sums)
umount /tmp/mnt

echo "--- killed, and detached by force"
kill -KILL "$(server)"
sleep 1
riser detach "$device"
[ ! -e "$device" ] || fail "the device was not removed"
[ "$(riser list -o json)" = "[]" ] || fail "an attachment is still listed"
rmmod ublk_drv
stop_serving
