#: group: srp
#: about: 1, 12 and 255 descriptors per request, with and without indirect tables
#: limit: 600
for entries in 1 12 255; do
    srp_rig 64 1 indirect_sg_entries=2048
    for ext in 0 1; do
        srp_login cmd_sg_entries=$entries allow_ext_sg=$ext sg_tablesize=$((ext ? 2048 : entries)) max_sect=8192
        verify "$DISK" 16m --bsrange=4k-4m --iodepth=4 --mem=mmap
        srp_logout
    done
    stop_serving
    srp_clean
done
trap - EXIT
