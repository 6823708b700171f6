#: group: srp
#: about: verified I/O from 512 B to 4 MiB
#: limit: 400
srp_rig 64 1 indirect_sg_entries=2048
srp_login ch_count=2 max_sect=8192 cmd_sg_entries=255 allow_ext_sg=1
for bs in 512 4k 60k 1m 4m; do
    size=$([ "$bs" = 512 ] && echo 512k || { [ "$bs" = 4k ] && echo 4m || echo 24m; })
    verify "$DISK" "$size" --bs="$bs" --iodepth=8
done
verify "$DISK" 16m --bsrange=512-256k --iodepth=8
srp_logout
stop_serving
