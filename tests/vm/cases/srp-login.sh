#: group: srp
#: about: ib_srp login with one and four channels, capacity and identity, logout
#: limit: 240
#: short: yes
two_hosts
trap srp_clean EXIT
serve_disks 64 2
load_srp
for channels in 1 4; do
    srp_login ch_count=$channels
    [ "$(cat /sys/class/scsi_host/host*/ch_count 2>/dev/null | head -1)" = $channels ] || fail "expected $channels channels"
    [ "$(blockdev --getsize64 "$DISK")" = $((64 << 20)) ] || fail "unexpected size"
    sg_inq "$DISK" | tee /dev/stderr | grep -q 'RISER' || fail "unexpected vendor"
    sg_vpd -p 0x80 "$DISK" | grep -q RIG-0 || fail "unexpected serial number"
    sg_vpd -p 0x83 "$DISK"
    luns=$(sg_luns "$DISK")
    echo "$luns"
    [[ $luns == *"length = 16"* ]] || fail "expected two logical units"
    find_disk 1 || fail "the second disk is missing"
    dd if=/dev/urandom of="$DISK" bs=64k count=16 oflag=direct status=none
    srp_logout
done
stop_serving
