#: group: srp
#: about: riserd on rdma_core: login with one and four channels, verified I/O, the list of devices
#: limit: 300
core_rig
"$RISER_BIN/riserd" devices | tee /dev/stderr | grep -q 'rdma_core: rxe0 at .*10.99.0.2' || fail "not listed"
for channels in 1 4; do
    srp_login ch_count=$channels
    [ "$(blockdev --getsize64 "$DISK")" = $((64 << 20)) ] || fail "wrong size"
    sg_vpd -p 0x80 "$DISK" | grep -q RIG-0 || fail "wrong serial number"
    verify "$DISK" 4m --bsrange=512-256k --iodepth=8
    srp_logout
done
stop_serving
