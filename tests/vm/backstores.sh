# Functions for cases where riser writes to each kind of kernel backstore, with write cache and FUA
# enabled and disabled. A case must set SCHEME to iscsi, iser or srp and then read this file.
#
# fileio and block use /dev/vda, which has a volatile cache, so we can count its flushes.

# Kind, emulate_write_cache, emulate_fua_write. DPOFUA is reported if both are enabled.
BACKSTORES="
fileio  0 0
fileio  0 1
fileio  1 0
fileio  1 1
block   0 1
block   1 0
block   1 1
ramdisk 0 1
ramdisk 1 0
ramdisk 1 1
"

CORE_TREE=/sys/kernel/config/target/core
HOST_IQN=iqn.2026-01.com.example:riser
TARGET_IQN=iqn.2026-01.com.example:backstores
TPG=/sys/kernel/config/target/iscsi/$TARGET_IQN/tpgt_1
PORTAL=$TPG/np/10.99.0.1:3260
[ $SCHEME != srp ] || PORTAL=

all_backstores() {
    local kind cache fua
    two_hosts
    trap backstores_clean EXIT
    modprobe -a virtio_blk fuse target_core_mod target_core_file target_core_iblock iscsi_target_mod
    case $SCHEME in
    iser) modprobe ib_isert ;;
    srp) modprobe ib_srpt ;;
    esac
    wait_for 20 test -b /dev/vda
    while read -r kind cache fua; do
        [ -n "$kind" ] || continue
        echo "--- $kind, cache $cache, FUA $fua"
        make_backstore "$kind" "$cache" "$fua"
        expose
        verified_flushes
        fua_writes "$kind$cache$fua"
        lost_sessions "$cache"
        withdraw
    done <<<"$BACKSTORES"
}

# Creates a backstore and sets STORE: make_backstore KIND CACHE FUA
make_backstore() {
    local kind=$1 cache=$2 fua=$3 mode="write through" control
    case $kind in
    fileio)
        STORE=$CORE_TREE/fileio_0/store
        control="fd_dev_name=/dev/vda,fd_dev_size=$((64 << 20))"
        # Without this, writes use O_DSYNC.
        [ "$cache" = 0 ] || control+=,fd_buffered_io=1
        ;;
    block) STORE=$CORE_TREE/iblock_0/store control=udev_path=/dev/vda ;;
    ramdisk) STORE=$CORE_TREE/rd_mcp_0/store control=rd_pages=$((64 << 8)) ;;
    esac
    # A block backstore uses the cache setting of its device, and its attribute cannot be changed.
    [ "$kind$cache" = block0 ] || mode="write back"
    echo "$mode" >/sys/block/vda/queue/write_cache
    [ "$(cat /sys/block/vda/queue/write_cache)" = "$mode" ] || fail "the cache of /dev/vda is not $mode"
    mkdir -p "$STORE"
    echo "$control" >"$STORE/control"
    echo 1 >"$STORE/enable"
    [ "$kind" = block ] || echo "$cache" >"$STORE/attrib/emulate_write_cache"
    echo "$fua" >"$STORE/attrib/emulate_fua_write"
}

# Exports STORE as LUN 0 of a target and sets URL.
expose() {
    local attribute w
    if [ $SCHEME = srp ]; then
        w=$(sed s/0x// /sys/module/ib_srpt/parameters/srpt_service_guid)
        URL="srp://10.99.0.1/0?id_ext=$w&ioc_guid=$w"
        w=$(cut -d: -f5-8 /sys/class/infiniband/rxe0/ports/1/gids/0)
        TPG=/sys/kernel/config/target/srpt/$w/$w
        mkdir -p "$TPG/lun/lun_0" "$TPG/acls/10.99.0.1/lun_0"
        ln -s "$STORE" "$TPG/lun/lun_0/disk"
        ln -s "$TPG/lun/lun_0" "$TPG/acls/10.99.0.1/lun_0/disk"
        echo 5555 >/sys/kernel/config/target/srpt/discovery_auth/rdma_cm_port
    else
        URL="$SCHEME://10.99.0.1/$TARGET_IQN/0?initiator=$HOST_IQN"
        mkdir -p "$TPG/lun/lun_0" "$PORTAL"
        ln -s "$STORE" "$TPG/lun/lun_0/disk"
        [ $SCHEME = iscsi ] || echo 1 >"$PORTAL/iser"
        for attribute in authentication=0 generate_node_acls=1 demo_mode_write_protect=0 cache_dynamic_acls=1; do
            echo "${attribute#*=}" >"$TPG/attrib/${attribute%=*}"
        done
    fi
    echo 1 >"$TPG/enable"
}

# Removes the target and STORE.
withdraw() {
    echo 0 >"$TPG/enable"
    rm -f "$TPG"/acls/*/lun_*/disk "$TPG"/lun/lun_*/disk
    rmdir "$TPG"/acls/*/lun_* "$TPG"/acls/* "$TPG"/lun/lun_* "$TPG"/np/* "$TPG" "$(dirname "$TPG")" 2>/dev/null || true
    rmdir "$STORE"
}

backstores_clean() {
    set +e
    riser_on roce list
    riser_on roce detach --force /tmp/store
    [ ! -d "$TPG" ] || withdraw
    rmdir $CORE_TREE/*_0 /sys/kernel/config/target/iscsi /sys/kernel/config/target/srpt 2>/dev/null
    modprobe -r ib_isert ib_srpt iscsi_target_mod 2>/dev/null
    one_host
}

# Verified writes, with a flush after 16 writes.
verified_flushes() {
    riser_on roce bench --overwrite "$URL" --rw randwrite --bs 16K --depth 8 --fsync 16 --total 4M --size 16M \
        --warm-up 0 --verify --timeout 60s
}

# Prints the number of flushes for /dev/vda.
flushes() {
    awk '{ print $16 }' /sys/block/vda/stat
}

# Checks that each write with FUA reaches the medium, even if the unit doesn't report DPOFUA:
# fua_writes ROW
fua_writes() {
    local before after
    before=$(flushes)
    riser_on roce bench --overwrite "$URL" --rw write --bs 4K --depth 1 --fua --total 128K --warm-up 0 --timeout 60s
    after=$(flushes)
    case $1 in
    ramdisk?? | block0?) ;;
    # LIO reports DPOFUA but ignores FUA, because /dev/vda doesn't support it. This can be avoided
    # with emulate_fua_write=0.
    block11) [ "$after" = "$before" ] || fail "LIO flushed, which contradicts the limit in the book" ;;
    *) [ $((after - before)) -ge 32 ] || fail "32 writes with FUA caused $((after - before)) flushes" ;;
    esac
}

# Tests sessions that are lost after a flush and before a flush: lost_sessions CACHE
lost_sessions() {
    mkdir -p /tmp/store
    riser_on roce attach "$URL" --fuse /tmp/store --timeout 60s
    # With SRP, we can't disable a single portal.
    python3 "$RISER_ROOT/tests/vm/flush.py" /tmp/store/lun0 "$1" "$TPG" ${PORTAL:+"$PORTAL"}
    riser_on roce detach /tmp/store
    # Read the data in a new session.
    riser_on roce read "$URL" --length 64K | cmp - /tmp/written
}
