# Functions for cases with the kernel's iSCSI target (LIO), over TCP and iSER. A case must set
# SCHEME to iscsi or iser and then read this file.
LIO_IQN=iqn.2026-01.com.example:lio
LIO=/sys/kernel/config/target/iscsi/$LIO_IQN/tpgt_1
HOST_IQN=iqn.2026-01.com.example:riser
case $SCHEME in
# To follow a stream, we need complete segments.
iscsi) CAPTURED="-s 0 -c 10000 tcp port 3260" ;;
# Logins are longer than the default of 400 bytes.
iser) CAPTURED="-s 1000 -c 100000 udp port 4791" ;;
esac

# Starts the kernel's target on 10.99.0.1:3260, after `two_hosts`. LUN 0 is a 96 MiB file, LUN 1 is
# a 64 MiB RAM disk. Sets TARGET to its address without the LUN.
lio_target() {
    local core=/sys/kernel/config/target/core lun
    mkdir -p /etc/target/pr /var/target/pr
    mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
    modprobe -a target_core_mod target_core_file iscsi_target_mod
    [ $SCHEME = iscsi ] || modprobe ib_isert
    mkdir -p $core/fileio_0/f0 $core/rd_mcp_1/r0
    truncate -s 96M "$IMAGES/lio.img"
    echo "fd_dev_name=$IMAGES/lio.img,fd_dev_size=$((96 << 20)),fd_buffered_io=1" >$core/fileio_0/f0/control
    echo "rd_pages=$((64 << 8))" >$core/rd_mcp_1/r0/control
    echo RIG-F0 >$core/fileio_0/f0/wwn/vpd_unit_serial
    echo 1 >$core/fileio_0/f0/enable
    echo 1 >$core/rd_mcp_1/r0/enable
    mkdir -p "$LIO/lun/lun_0" "$LIO/lun/lun_1" "$LIO/np/10.99.0.1:3260"
    ln -s $core/fileio_0/f0 "$LIO/lun/lun_0/disk"
    ln -s $core/rd_mcp_1/r0 "$LIO/lun/lun_1/disk"
    [ $SCHEME = iscsi ] || echo 1 >"$LIO/np/10.99.0.1:3260/iser"
    lio_attribute authentication 0
    lio_attribute generate_node_acls 1
    lio_attribute demo_mode_write_protect 0
    lio_attribute cache_dynamic_acls 1
    echo 1 >"$LIO/enable"
    TARGET=$SCHEME://10.99.0.1/$LIO_IQN
}

lio_attribute() {
    echo "$2" >"$LIO/attrib/$1"
}

# Prints the address of a logical unit: lio_lun NUMBER [QUERY]
lio_lun() {
    echo "$TARGET/$1?initiator=$HOST_IQN${2:+&$2}"
}

lio_clean() {
    set +e
    end_capture
    riser_on roce list
    echo 0 >"$LIO/enable"
    rm -f "$LIO"/acls/*/lun_*/disk "$LIO"/lun/lun_*/disk
    rmdir "$LIO"/acls/*/lun_* "$LIO"/acls/* "$LIO"/lun/lun_* "$LIO"/np/* "$LIO" "$(dirname "$LIO")" 2>/dev/null
    rmdir /sys/kernel/config/target/iscsi /sys/kernel/config/target/core/*/[fr]0 /sys/kernel/config/target/core/*_[01]
    modprobe -r ib_isert iscsi_target_mod
    rm -f "$IMAGES/lio.img"
    one_host
}

lio_rig() {
    two_hosts
    trap lio_clean EXIT
    lio_target
}

# Prints the providers to test. TCP doesn't use a provider.
lio_providers() {
    [ $SCHEME = iscsi ] && echo roce || echo roce rdma_core
}

# --- cases for both transports ---

find_and_describe() {
    local provider said lun
    lio_rig
    for provider in $(lio_providers); do
        echo "--- $provider"
        said=$(riser_on $provider discover "$SCHEME://10.99.0.1")
        echo "$said"
        [[ $said == *$LIO_IQN* ]] || fail "the target was not found"
        said=$(riser_on $provider inquiry "$(lio_lun 0)")
        echo "$said"
        [[ $said == *RIG-F0* ]] || fail "unexpected serial number"
        dd if=/dev/urandom of=/tmp/in bs=1M count=3 status=none
        for lun in 0 1; do
            riser_on $provider write --overwrite "$(lio_lun $lun)" /tmp/in --offset 5000
            riser_on $provider read "$(lio_lun $lun)" --offset 5000 --length 3M >/tmp/out
            cmp /tmp/in /tmp/out
        done
        refused $provider 5 "no such logical unit" read "$(lio_lun 9)"
        refused $provider 3 'log in' read "$SCHEME://10.99.0.1/iqn.2026-01.com.example:absent/0"
    done
}

verified_io() {
    local provider
    lio_rig
    for provider in $(lio_providers); do
        lio_bench $provider 0 "" 512 1M
        lio_bench $provider 1 "" 4K 8M
        lio_bench $provider 1 "" 128K 24M
        lio_bench $provider 0 "" 1M 48M
        lio_bench $provider 1 "" 4M 48M
        if [ $SCHEME = iscsi ]; then
            lio_bench $provider 0 "header_digest=crc32c&data_digest=crc32c" 64K 16M
        fi
    done
}

lio_bench() {
    local provider=$1 lun=$2 keys=$3 bs=$4
    echo "--- $provider lun $lun $keys bs $bs"
    verified_bench "$provider" "$(lio_lun "$lun" "$keys")" "$bs" "$5" 48M
}

chap_of_lio() {
    local acl=$LIO/acls/$HOST_IQN provider
    lio_rig
    mkdir -p "$acl/lun_0"
    ln -s "$LIO/lun/lun_0" "$acl/lun_0/disk"
    # The kernel would treat a newline as part of the name.
    echo -n host >"$acl/auth/userid"
    echo -n "twelve bytes and more" >"$acl/auth/password"
    lio_attribute authentication 1
    for provider in $(lio_providers); do
        echo "--- $provider"
        refused $provider 3 'log in' read "$(lio_lun 0)"
        export RISER_CHAP_PASSWORD="not the right secret"
        refused $provider 3 'log in' read "$SCHEME://host@10.99.0.1/$LIO_IQN/0?initiator=$HOST_IQN"
        export RISER_CHAP_PASSWORD="twelve bytes and more"
        riser_on $provider read "$SCHEME://host@10.99.0.1/$LIO_IQN/0?initiator=$HOST_IQN" --length 512 >/dev/null
        unset RISER_CHAP_PASSWORD
    done
}
