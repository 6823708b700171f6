#: group: srp
#: about: sg_reset of device and bus every second during writes
#: limit: 300
PARAMS=ch_count=4
three_disks_rig
load /dev/mapper/paths 15 --bs=16k
for ((i = 0; i < 6; i++)); do
    sleep 1
    sg_reset --no-esc -d "$DISK" || fail "the device reset failed"
    sleep 1
    # ib_srp doesn't support a bus reset, so this may fail.
    sg_reset --no-esc -b "$DISK" || true
    for d in /sys/class/scsi_device/*/device; do
        [ "$(cat "$d/state")" = offline ] && echo running >"$d/state"
    done
done
loaded
