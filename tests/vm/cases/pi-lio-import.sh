#: group: pi
#: about: riserd imports disks that LIO has written with protection information, and LIO serves them after an export
#: limit: 1800
OVER=iscsi
. /vm/pi.sh

# Prints the block device of a generic device.
block_device() {
    echo "/dev/$(ls "/sys/class/scsi_generic/$(basename "$1")/device/block")"
}

# Prints the tuples in LIO's file: lio_tuples FILE LBA COUNT
lio_tuples() {
    xxd -p -c 8 -s $(($2 * 8)) -l $(($3 * 8)) "$1" | sed 's/^\(....\)\(....\)/\1.\2./'
}

# Reads all blocks of a disk, each of which is checked, and compares them with an image: same DISK IMAGE
same() {
    dd if="$1" of=/tmp/read bs=1M iflag=direct status=none || fail "cannot read $1"
    cmp /tmp/read "$2" || fail "$1 has other data"
}

# Compares the tuples of a disk with LIO's file: same_tuples DISK FILE
same_tuples() {
    local lba
    for lba in 0 500 1000 1500 $((LAST - 499)); do
        $PI tuples "$1" $lba 500 >/tmp/first
        lio_tuples "$2" $lba 500 >/tmp/second
        diff /tmp/first /tmp/second || fail "$1 has other tuples"
    done
}

scrubbed() {
    on_peer "$RISER_BIN/riserd" scrub -o json >/tmp/scrub
    grep -q '"state":"completed"' /tmp/scrub
}

riserd() {
    on_peer "$RISER_BIN/riserd" "$@"
}

no_imported_disk() {
    ! find_disk 9
}

pi_rig
for size in 512 4096; do
    LAST=$(((8 << 20) / size - 1))
    for type in 1 3; do
        echo "--- type $type, $size bytes"
        lio_disk $type $size
        theirs=$(generic LIO-ORG 0)
        # Tuples that LIO generates, tuples that it receives, and deallocated blocks.
        $PI write "$theirs" 0 64 1
        $PI write "$theirs" 100 200 2
        $PI write "$theirs" 150 8 3 1
        for lba in 1000 1008 1016 1024; do $PI write "$theirs" $lba 8 4 1; done
        $PI write "$theirs" $((LAST - 7)) 8 5
        sg_unmap --force --lba=120 --num=16 "$theirs"
        # These names remain when LIO's disk is removed.
        ln "$IMAGES/lio.img" "$IMAGES/disk-lio.img"
        ln "$IMAGES/lio.img.protection" "$IMAGES/disk-lio.img.protection"
        remove_lio_disk

        riserd import-disk --type $type --block-size $size "$IMAGES/disk-lio.img" "$IMAGES/disk-imported.img" | tee /tmp/said
        grep -q ": $((64 + 200 + 32 + 8 - 16)) verified, " /tmp/said || fail "another number of verified blocks"
        riserd create /backends/imported kind=file path="$IMAGES/disk-imported.img" block_size=$size protection/type=$type
        riserd create /targets/rig/luns/9 backend=imported
        iscsiadm -m session -R
        wait_for 60 find_disk 9
        find_disk 9
        ours=$(generic RISER 9)
        same "$DISK" "$IMAGES/disk-lio.img"
        same_tuples "$ours" "$IMAGES/disk-lio.img.protection"
        riserd scrub imported --rate 0
        wait_for 30 scrubbed
        ! grep -q '"lba"' /tmp/scrub || fail "defects: $(cat /tmp/scrub)"

        # The same in the other direction, after more writes.
        $PI write "$ours" 400 8 6
        $PI write "$ours" 420 8 7 1
        dd if="$DISK" of="$IMAGES/disk-expected.img" bs=1M iflag=direct status=none
        ! cmp -s "$IMAGES/disk-expected.img" "$IMAGES/disk-lio.img" || fail "the writes have no effect"
        for lba in 0 500 1000; do $PI tuples "$ours" $lba 500; done >/tmp/tuples
        echo 1 >"/sys/block/$(basename "$DISK")/device/delete"
        wait_for 30 no_imported_disk
        riserd delete /targets/rig/luns/9
        riserd delete /backends/imported
        # The daemon may still close the file.
        wait_for 30 riserd export-disk "$IMAGES/disk-imported.img" "$IMAGES/lio.img"
        lio_tuples "$IMAGES/lio.img.protection" 0 1500 | diff /tmp/tuples - || fail "other tuples were exported"
        lio_disk $type $size keep
        theirs=$(generic LIO-ORG 0)
        same "$(block_device "$theirs")" "$IMAGES/disk-expected.img"
        remove_lio_disk
        rm "$IMAGES"/disk-lio.img* "$IMAGES"/disk-imported.img "$IMAGES"/disk-expected.img
    done
done
