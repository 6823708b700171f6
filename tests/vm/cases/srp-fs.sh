#: group: srp
#: about: mkfs, copy and fsck, and reading after a restart of the daemon
#: limit: 300
srp_rig 128 1
srp_login ch_count=2
modprobe ext4
mkfs.ext4 -q -F "$DISK"
mkdir -p /tmp/mnt
mount "$DISK" /tmp/mnt
for i in $(seq 1 60); do head -c $((i * 4001)) /dev/urandom >"/tmp/mnt/file$i"; done
cp -r /tmp/mnt /tmp/mnt/copy 2>/dev/null || true
mkdir -p /tmp/mnt/two && cp /tmp/mnt/file* /tmp/mnt/two/
(cd /tmp/mnt && find . -type f -name 'file*' -print0 | sort -z | xargs -0 sha256sum) >/tmp/sums
umount /tmp/mnt
fsck.ext4 -fn "$DISK"
srp_logout
stop_serving
serve_again
srp_login ch_count=1
fsck.ext4 -fn "$DISK"
mount "$DISK" /tmp/mnt
(cd /tmp/mnt && sha256sum --quiet -c /tmp/sums) || fail "the data differ"
umount /tmp/mnt
srp_logout
stop_serving
