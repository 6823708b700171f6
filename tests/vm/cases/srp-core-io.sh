#: group: srp
#: about: riserd on rdma_core: verified I/O from 512 B to 4 MiB, scattered, with resets under load
#: limit: 400
core_rig indirect_sg_entries=2048
srp_login ch_count=4 max_sect=8192 cmd_sg_entries=255 allow_ext_sg=1
for bs in 512 4k 60k 1m 4m; do
    size=$([ "$bs" = 512 ] && echo 512k || { [ "$bs" = 4k ] && echo 4m || echo 24m; })
    verify "$DISK" "$size" --bs="$bs" --iodepth=8
done
verify "$DISK" 16m --bsrange=512-256k --iodepth=8
load "$DISK" 8
for i in 1 2 3; do
    sleep 1
    sg_reset --no-esc -d "$DISK" || fail "no device reset"
    sg_reset -H "$DISK" || fail "no host reset"
done
loaded
srp_logout
stop_serving
