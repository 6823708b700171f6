#: group: srp
#: about: sg_reset of device, bus and host during writes; no data is lost
#: limit: 300
srp_rig 64 1
srp_login ch_count=2
load "$DISK" 15
for i in 1 2 3; do
    sleep 1
    sg_reset --no-esc -d "$DISK" || fail "the device reset failed"
    sleep 1
    sg_reset -b "$DISK" || true
    sleep 1
    sg_reset -H "$DISK" || fail "the host reset failed"
done
loaded
srp_logout
stop_serving
