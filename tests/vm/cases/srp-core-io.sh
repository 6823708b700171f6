#: group: srp
#: about: riserd on rdma_core: large and scattered transfers, resets under load
#: limit: 400
core_rig indirect_sg_entries=2048
srp_login ch_count=2 max_sect=8192 cmd_sg_entries=255 allow_ext_sg=1
for bs in 512 4k 1m 4m; do
    verify "$DISK" "$([ "$bs" = 512 ] && echo 512k || echo 16m)" --bs="$bs" --iodepth=8
done
load "$DISK" 8
for i in 1 2 3; do
    sleep 1
    sg_reset --no-esc -d "$DISK" || fail "no device reset"
    sg_reset -H "$DISK" || fail "no host reset"
done
loaded
srp_logout
stop_serving
