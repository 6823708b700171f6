#: group: srp
#: about: all logical units appear with the correct identity and are removed with the session
#: limit: 180
PARAMS=ch_count=4
three_disks_rig
multipath_end
three() { [ "$(ls -d /sys/class/scsi_device/*/device/block/* | wc -l)" = 3 ]; }
wait_for 30 three
for lun in 0 1 2; do
    find_disk $lun || fail "LUN $lun has no disk"
    grep -aq "RIG-$lun" "/sys/block/${DISK#/dev/}/device/vpd_pg80" || fail "unexpected serial number of LUN $lun"
    head -c 4096 /dev/urandom >/tmp/block
    dd if=/tmp/block of="$DISK" bs=4096 seek=7 oflag=direct conv=fsync status=none
    cmp -n 4096 /tmp/block "$IMAGES/disk$lun.img" 0 $((7 * 4096)) || fail "LUN $lun has the data of another file"
done
srp_logout
for lun in 0 1 2; do
    find_disk $lun && fail "LUN $lun was not removed" || true
done
