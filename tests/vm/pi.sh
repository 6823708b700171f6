# Functions for cases with protection information. A case must set OVER to iscsi, iser or srp and then read this file.
case $OVER in
iscsi) TRANSPORT=tcp ;;
iser) TRANSPORT=iser ;;
esac
[ $OVER = srp ] || . /vm/iscsi.sh
PI="python3 $RISER_ROOT/tests/vm/pi.py"
DIFFERENCES=$RISER_ROOT/tests/vm/pi-differences.txt
# Maximum CDB length of the host.
case $OVER in
iscsi) CDB=32 ;;
*) CDB=16 ;;
esac

# Serves a disk for each protection type and block length, and logs in. The arguments are additional keys of protection.
pi_rig() {
    # This has to be loaded before the disks exist.
    modprobe -a sd_mod sg_pi
    two_hosts
    trap pi_clean EXIT
    # With a pipe, serve would set RISERD in a subshell only.
    pi_config "$@" >/tmp/pi.yaml
    serve </tmp/pi.yaml
    case $OVER in
    srp)
        modprobe ib_srp
        wait_for 10 test -e /sys/class/infiniband_srp/srp-rxe0-1/add_target
        srp_login
        ;;
    *)
        start_iscsid
        iscsi_node
        iscsi_login
        ;;
    esac
    wait_for 60 find_disk "$(pi_lun 3 4096)"
}

pi_config() {
    local type size
    echo "backends:"
    for type in 1 2 3; do
        for size in 512 4096; do
            echo "  type$type-$size:"
            echo "    kind: file"
            echo "    path: $IMAGES/disk-$type-$size.img"
            echo "    size: 8MiB"
            echo "    create: true"
            echo "    thin: true"
            echo "    block_size: $size"
            echo "    protection: { type: $type${1:+, $1} }"
        done
    done
    echo "targets:"
    echo "  - name: rig"
    echo "    access: open"
    case $OVER in
    srp) echo "    portals: [{ protocol: srp, listen: 10.99.0.2, ioc_guid: 0x$GUID }]" ;;
    iser)
        echo "    iqn: $IQN"
        # Discovery uses TCP.
        echo "    portals: [{ protocol: iser, listen: 10.99.0.2 }, { protocol: iscsi, listen: 10.99.0.2 }]"
        ;;
    iscsi)
        echo "    iqn: $IQN"
        echo "    portals: [{ protocol: iscsi, listen: 10.99.0.2 }]"
        ;;
    esac
    echo "    luns:"
    for type in 1 2 3; do
        for size in 512 4096; do echo "      $(pi_lun $type $size): type$type-$size"; done
    done
}

# Prints the LUN of a disk: pi_lun TYPE SIZE
pi_lun() {
    echo $((($1 - 1) * 2 + ($2 == 4096)))
}

# Prints the generic device of a vendor's LUN: generic VENDOR LUN
generic() {
    local d
    for d in /sys/class/scsi_device/*:"$2"/device; do
        [[ $(cat "$d/vendor") == "$1"* ]] || continue
        echo "/dev/$(ls "$d/scsi_generic")"
        return 0
    done
    return 1
}

# Compares a disk with one of the kernel: against JUDGE VENDOR TYPE SIZE
against() {
    local first second
    first=$(generic "$2" 0)
    second=$(generic RISER "$(pi_lun "$3" "$4")")
    $PI compare "$1" "$first" "$second" "$DIFFERENCES" cdb=$CDB |
        sed "s/^\([0-9]* commands\)/result: $1, type $3, $4 bytes: \1/" || DIFFERENT=yes
}

# Fails if there was any unexpected difference.
no_difference() {
    [ -z "${DIFFERENT:-}" ] || fail "unexpected differences"
}

# Checks that a disk with another protection type is detected: distinguishes JUDGE VENDOR
distinguishes() {
    $PI compare "$1" "$(generic "$2" 0)" "$(generic RISER "$(pi_lun 3 512)")" "$DIFFERENCES" cdb=$CDB other_type=yes >/tmp/other || true
    grep -q 'wrong reference tag on the medium | status | b/10/03 | good' /tmp/other || fail "types 1 and 3 are not distinguished"
}

# Creates a disk of scsi_debug: debug_disk TYPE SIZE
debug_disk() {
    modprobe scsi_debug dif="$1" dix=1 sector_size="$2" dev_size_mb=8 delay=0 lbpu=1 lbpws=1 lbpws10=1 unmap_granularity=1 lbprz=1
    wait_for 30 generic Linux 0
}

against_debug() {
    local type size
    # It reports each failed check.
    echo 1 >/proc/sys/kernel/printk
    for size in 512 4096; do
        for type in 1 2 3; do
            debug_disk $type $size
            against scsi_debug Linux $type $size
            modprobe -r scsi_debug
        done
    done
    debug_disk 1 512
    distinguishes scsi_debug Linux
    modprobe -r scsi_debug
    no_difference
}

LIO_CORE=/sys/kernel/config/target/core/fileio_0/pi
LIO_LOOP=/sys/kernel/config/target/loopback/naa.6001405000000001

# Creates a disk of LIO on tcm_loop, with its protection information in lio.img.protection, which is erased unless keep
# is set: lio_disk TYPE SIZE [keep]
lio_disk() {
    modprobe -a target_core_mod target_core_file tcm_loop
    mkdir -p $LIO_CORE
    truncate -s 8M "$IMAGES/lio.img"
    echo "fd_dev_name=$IMAGES/lio.img,fd_dev_size=$((8 << 20)),fd_buffered_io=1" >$LIO_CORE/control
    echo PI >$LIO_CORE/wwn/vpd_unit_serial
    echo 1 >$LIO_CORE/enable
    echo "$2" >$LIO_CORE/attrib/block_size
    echo "$1" >$LIO_CORE/attrib/pi_prot_type
    [ "${3:-}" = keep ] || echo 1 >$LIO_CORE/attrib/pi_prot_format
    echo 1 >$LIO_CORE/attrib/emulate_tpu
    echo 1 >$LIO_CORE/attrib/emulate_tpws
    mkdir -p $LIO_LOOP/tpgt_1/lun/lun_0
    echo naa.6001405000000002 >$LIO_LOOP/tpgt_1/nexus
    ln -s $LIO_CORE $LIO_LOOP/tpgt_1/lun/lun_0/disk
    wait_for 30 generic LIO-ORG 0
}

against_lio() {
    local type size
    echo 1 >/proc/sys/kernel/printk
    for size in 512 4096; do
        # LIO doesn't support type 2.
        for type in 1 3; do
            lio_disk $type $size
            against LIO LIO-ORG $type $size
            remove_lio_disk
        done
    done
    lio_disk 1 512
    distinguishes LIO LIO-ORG
    remove_lio_disk
    no_difference
}

remove_lio_disk() {
    rm $LIO_LOOP/tpgt_1/lun/lun_0/disk
    rmdir $LIO_LOOP/tpgt_1/lun/lun_0
    echo NULL >$LIO_LOOP/tpgt_1/nexus
    rmdir $LIO_LOOP/tpgt_1 $LIO_LOOP $LIO_CORE
    rm "$IMAGES"/lio.img*
}

# The kernel uses the disks without protection information, which riserd then generates and checks.
ordinary_disks() {
    local type size device
    modprobe ext4
    # ib_iser only uses protection information with an adapter that can check it.
    [ $OVER != iser ] || modprobe ib_iser pi_enable=1
    pi_rig
    for size in 512 4096; do
        for type in 1 2 3; do
            find_disk "$(pi_lun $type $size)"
            echo "--- type $type, $size bytes: $DISK"
            device=$(generic RISER "$(pi_lun $type $size)")
            [ ! -e "/sys/block/$(basename "$DISK")/integrity/format" ] ||
                grep -qx 'none\|nop' "/sys/block/$(basename "$DISK")/integrity/format" || fail "the kernel uses protection information"
            verify "$DISK" 2m --bs=4k
            verify "$DISK" 2m --bsrange=4k-256k --iodepth=4
            generated
            mkfs.ext4 -q -F "$DISK"
            mkdir -p /tmp/mnt
            mount "$DISK" /tmp/mnt
            dd if=/dev/urandom of=/tmp/mnt/file bs=64k count=16 status=none
            sha256sum /tmp/mnt/file >/tmp/sums
            umount /tmp/mnt
            mount "$DISK" /tmp/mnt
            sha256sum --quiet -c /tmp/sums
            umount /tmp/mnt
            generated
            # With type 2, blocks that are written without protection information are not checked.
            [ $type = 2 ] || wrong_block_fails "$device" $size
        done
    done
}

# Checks the stored protection information of $device.
generated() {
    # With type 2, it can only be read by 32-byte CDBs.
    [ $type = 2 ] && [ $CDB -lt 32 ] || $PI generated "$device" 0 256
}

# A block whose stored guard is wrong must not be read: wrong_block_fails DEVICE SIZE
wrong_block_fails() {
    local status=0
    $PI write "$1" 40 1 1 3 1
    dd if="$DISK" of=/dev/null bs="$2" skip=40 count=1 iflag=direct status=none 2>/tmp/said || status=$?
    [ $status = 1 ] && grep -q 'error' /tmp/said || fail "read a block with a wrong guard"
    $PI write "$1" 40 1 1
    dd if="$DISK" of=/dev/null bs="$2" skip=40 count=1 iflag=direct status=none
}

pi_clean() {
    set +e
    modprobe -r scsi_debug
    [ ! -d $LIO_LOOP ] || remove_lio_disk
    case $OVER in
    srp) srp_clean ;;
    *) iscsi_clean ;;
    esac
}
