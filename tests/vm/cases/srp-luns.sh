#: group: srp
#: about: logical units are added and removed with SIGHUP during writes to another unit
#: limit: 300
srp_rig 64 1
srp_login ch_count=2
load "$DISK" 12
first=$DISK
cp /tmp/riserd.yaml /tmp/one.yaml
sed -e "s|^targets:|  more: { kind: file, path: $IMAGES/disk-more.img, size: 32MiB, create: true, serial: MORE }\n&|" \
    -e 's|^      0: disk0|&\n      5: more|' /tmp/one.yaml >/tmp/two.yaml
scan() { for h in /sys/class/scsi_host/host*; do [ -e "$h/ch_count" ] && echo '- - -' >"$h/scan"; done; true; }
applied() { [ "$(grep -c 'configuration applied' "$KEEP/riserd.log")" = "$1" ]; }
for round in 1 2; do
    cp /tmp/two.yaml /tmp/riserd.yaml
    kill -HUP "$RISERD"
    wait_for 20 applied $((2 * round - 1))
    scan
    wait_for 20 find_disk 5
    verify "$DISK" 4m --bs=64k
    # Removes the unit under load: commands in flight complete, later commands are rejected.
    fio --name=away --filename="$DISK" --size=32m --rw=randread --direct=1 --ioengine=libaio \
        --iodepth=4 --bs=4k --time_based --runtime=5 --output="$KEEP/fio-away-$round.txt" &
    away=$!
    sleep 1
    cp /tmp/one.yaml /tmp/riserd.yaml
    kill -HUP "$RISERD"
    wait_for 20 applied $((2 * round))
    wait "$away" && fail "a removed unit still responds"
    echo 1 >"/sys/class/block/$(basename "$DISK")/device/delete"
    # Its image is no longer locked.
    wait_for 10 flock -n "$IMAGES/disk-more.img" true
done
grep -q 'LUN assignments on this target have changed' <(dmesg) || fail "the initiator was not notified"
sed 's/max_transfer: 8MiB/max_transfer: 4MiB/' /tmp/one.yaml >/tmp/riserd.yaml
kill -HUP "$RISERD"
refused() { grep -q 'not applied.*limits.max_transfer changed' "$KEEP/riserd.log"; }
wait_for 10 refused
DISK=$first
loaded
srp_logout
stop_serving
