# Functions for all cases. Each case runs as root in the guest, after this file.
set -euo pipefail

IMAGES=/dev/shm
KEEP=/vm/keep
mkdir -p "$KEEP"

. "$RISER_ROOT/tests/vm/common.sh"

# Prints the code blocks in a section of the book, using the addresses of the rig: book PAGE SECTION
# LANGUAGE
book() {
    awk -v head="## $2" -v fence="\`\`\`$3" '
        /^## / { on = $0 == head; next }
        on && $0 == fence { code = 1; next }
        /^```/ { code = 0 }
        on && code' "$RISER_ROOT/docs/src/$1.md" |
        sed 's/192\.0\.2\.10/10.99.0.2/g; s/192\.0\.2\.20/10.99.0.1/g; s/eth0/v0/g'
}

# Runs a block like a user who types one line per second.
typed() {
    sed '/\\$/!s/$/\nsleep 1/' >/tmp/typed.sh
    cat /tmp/typed.sh
    . /tmp/typed.sh
}

# Command prefix to run a program where riserd runs, or empty if this is here.
PEER=()

# Runs a command where riserd runs.
on_peer() {
    "${PEER[@]}" "$@"
}

# Two hosts with an rdma_rxe device on one end of a veth pair. The other end is in network namespace
# `peer`, where the software NIC runs. With CORE=yes it's in this namespace and has a separate
# device, rxe1, for riserd on rdma_core, because rdma_rxe only supports the initial namespace; in
# this case there is a switch between both ends. Addresses: 10.99.0.1 and fd99::1 on v0, and
# 10.99.0.2 and fd99::2 on v1, the far end.
two_hosts() {
    local mtu=${1:-4500}
    modprobe -a veth rdma_rxe rdma_ucm ib_umad ib_uverbs
    if [ -n "${CORE:-}" ]; then
        switch "$mtu"
    else
        ip netns add peer
        PEER=(ip netns exec peer)
        ip link add v0 type veth peer name v1
        ip link set v1 netns peer
        # A capture must contain separate UDP segments as seen on v0. Otherwise several packets
        # would be captured as one, and only the first packet would be checked.
        on_peer ip link set v1 gso_max_segs 1
        on_peer ip link set lo up
    fi
    ip link set v0 mtu "$mtu" up
    on_peer ip link set v1 mtu "$mtu" up
    ip addr add 10.99.0.1/24 dev v0
    on_peer ip addr add 10.99.0.2/24 dev v1
    # IPv6 requires an MTU of at least 1280.
    if [ "$mtu" -ge 1280 ]; then
        ip addr add fd99::1/64 dev v0 nodad
        on_peer ip addr add fd99::2/64 dev v1 nodad
    fi
    capture
    rdma link add rxe0 type rxe netdev v0
    wait_for 20 gid_is_there rxe0 10.99.0.1
    if [ -n "${CORE:-}" ]; then
        ulimit -l unlimited
        over_the_wire
        rdma link add rxe1 type rxe netdev v1
        wait_for 20 gid_is_there rxe1 10.99.0.2
        # Wait until the CM knows the addresses.
        sleep 1
    fi
}

# Same as `two_hosts`, but with Linux's iWARP devices siw0 and, with CORE=yes, siw1 instead of
# rdma_rxe.
iwarp_hosts() {
    local mtu=${1:-1500}
    modprobe -a veth siw rdma_ucm ib_uverbs
    if [ -n "${CORE:-}" ]; then
        switch "$mtu"
        ulimit -l unlimited
    else
        ip netns add peer
        PEER=(ip netns exec peer)
        ip link add v0 type veth peer name v1
        ip link set v1 netns peer
        on_peer ip link set lo up
    fi
    ip link set v0 mtu "$mtu" up
    on_peer ip link set v1 mtu "$mtu" up
    ip addr add 10.99.0.1/24 dev v0
    on_peer ip addr add 10.99.0.2/24 dev v1
    ip addr add fd99::1/64 dev v0 nodad
    on_peer ip addr add fd99::2/64 dev v1 nodad
    CAPTURED="-s 400 -c 100000 tcp" capture
    rdma link add siw0 type siw netdev v0
    wait_for 20 grep -q ACTIVE /sys/class/infiniband/siw0/ports/1/state
    if [ -n "${CORE:-}" ]; then
        over_the_wire
        rdma link add siw1 type siw netdev v1
        wait_for 20 grep -q ACTIVE /sys/class/infiniband/siw1/ports/1/state
        # Wait until the CM knows the addresses.
        sleep 1
    fi
}

# Connects v0 and v1 to a switch in a separate namespace.
switch() {
    local n
    modprobe bridge
    ip netns add switch
    ip -n switch link add name sw0 type bridge
    for n in 0 1; do
        ip link add v$n type veth peer name p$n
        ip link set p$n netns switch
        ip -n switch link set p$n mtu "$1" master sw0 up
    done
    ip -n switch link set sw0 up
}

# Ensures that packets between the two ends use the wire, although both addresses belong to this
# host.
over_the_wire() {
    echo 1 >/proc/sys/net/ipv4/conf/all/accept_local
    ip rule add pref 10 iif lo lookup 100
    ip rule add pref 20 lookup local
    ip rule delete pref 0
    ip route add 10.99.0.2/31 dev v0 src 10.99.0.1 table 100
    ip route add 10.99.0.1 dev v1 src 10.99.0.2 table 100
}

# Disconnects or reconnects the far end: far_link down|up. With rdma_rxe on the far end, this must
# be done on the switch: if a device cannot send a MAD because its own link is down, it permanently
# loses its queue pair 1.
far_link() {
    case ${CORE:-}$1 in
    yesdown) ip -n switch link set p1 nomaster ;;
    yesup) ip -n switch link set p1 master sw0 ;;
    *) on_peer ip link set v1 "$1" ;;
    esac
}

# Returns whether a device has the GID for an IPv4 address: gid_is_there DEVICE ADDRESS
gid_is_there() {
    local hex
    hex=$(printf '%02x%02x:%02x%02x' ${2//./ })
    grep -q "ffff:$hex" "/sys/class/infiniband/$1/ports/1/gids/"* 2>/dev/null
}

# Reverts `two_hosts`.
one_host() {
    end_capture
    rdma link delete rxe0 2>/dev/null || true
    rdma link delete siw0 2>/dev/null || true
    if [ -n "${CORE:-}" ]; then
        rdma link delete rxe1 2>/dev/null || true
        rdma link delete siw1 2>/dev/null || true
        ip rule add pref 0 lookup local
        ip rule delete pref 20
        ip rule delete pref 10
    fi
    ip netns delete peer 2>/dev/null || true
    ip netns delete switch 2>/dev/null || true
    ip link delete v0 2>/dev/null || true
}

# Captures packets on the veth pair to the directory of the case: the first bytes of the first
# packets. CAPTURED sets the filter and limits, except for RoCE.
capture() {
    [ -z "${CAPTURE:-}" ] || return 0
    local file=$KEEP/packets.pcap n=1
    while [ -e "$file" ]; do file=$KEEP/packets-$((++n)).pcap; done
    tcpdump -B 65536 -i v0 -w "$file" ${CAPTURED:--s 400 -c 100000 udp port 4791} 2>/dev/null &
    CAPTURE=$!
    wait_for 60 test -e "$file"
}

end_capture() {
    [ -n "${CAPTURE:-}" ] || return 0
    # tcpdump receives packets with a delay of up to one second.
    sleep 1.2
    kill "$CAPTURE" 2>/dev/null || true
    wait "$CAPTURE" 2>/dev/null || true
    CAPTURE=
}

# Starts riserd with the configuration from standard input, and waits until it is serving. Its log
# is kept.
serve() {
    cat >/tmp/riserd.yaml
    [ -z "${CORE:-}" ] || echo "transport: { provider: rdma_core }" >>/tmp/riserd.yaml
    serve_again
}

# Starts riserd again with the same configuration.
serve_again() {
    local before
    before=$(grep -c ' serving ' "$KEEP/riserd.log" 2>/dev/null || true)
    "${PEER[@]}" "$RISER_BIN/riserd" run --config /tmp/riserd.yaml >>"$KEEP/riserd.log" 2>&1 &
    RISERD=$!
    wait_for 120 riserd_is_up "${before:-0}"
}

# Returns whether the log contains more than this number of messages that it is serving.
riserd_is_up() {
    kill -0 "$RISERD" && [ "$(grep -c ' serving ' "$KEEP/riserd.log")" -gt "$1" ]
}

# Stops riserd like systemd. It must exit without an error.
stop_serving() {
    kill -TERM "$RISERD"
    wait "$RISERD"
}

# Kills riserd.
kill_serving() {
    kill -KILL "$RISERD"
    wait "$RISERD" || true
}

# Serves disks for the kernel's ib_srp: serve_disks SIZE_MIB [COUNT] [extra configuration line …]
GUID=0200c0ffee000001
serve_disks() {
    local size=$1 count=${2:-1} i
    shift; shift || true
    {
        echo "backends:"
        for ((i = 0; i < count; i++)); do
            echo "  disk$i: { kind: file, path: $IMAGES/disk$i.img, size: ${size}MiB, create: true, serial: RIG-$i }"
        done
        echo "targets:"
        echo "  - name: rig"
        echo "    portals: [{ protocol: srp, listen: 10.99.0.2, ioc_guid: 0x$GUID }]"
        echo "    luns:"
        for ((i = 0; i < count; i++)); do echo "      $i: disk$i"; done
        echo "    access: open"
        for line in "$@"; do echo "$line"; done
    } >/tmp/disks.yaml
    serve </tmp/disks.yaml
}

# Loads ib_srp with these module parameters, and waits for its device.
load_srp() {
    modprobe -r ib_srp 2>/dev/null || true
    modprobe sd_mod
    modprobe sg
    modprobe ib_srp "$@"
    wait_for 10 test -e /sys/class/infiniband_srp/srp-rxe0-1/add_target
}

# Logs in with the kernel's initiator. Arguments are additional add_target parameters. Sets DISK to
# the device of LUN 0.
srp_login() {
    # If a host was just removed, it may still be in the list of the driver.
    wait_for 30 srp_add 10.99.0.2:5555 "$GUID" "$@"
    wait_for 60 find_disk 0
    find_disk 0
}

# Tries to log in: srp_add ADDRESS:PORT GUID [parameter …]
srp_add() {
    local dest=$1 guid=$2 IFS=,
    shift 2
    echo "id_ext=$guid,ioc_guid=$guid,dest=$dest${*:+,$*}" >/sys/class/infiniband_srp/srp-rxe0-1/add_target
}

# Sets DISK to the SCSI disk with this LUN.
find_disk() {
    local d
    for d in /sys/class/scsi_device/*:"$1"/device/block/*; do
        [ -e "$d" ] || continue
        DISK=/dev/$(basename "$d")
        [ -b "$DISK" ] && return 0
    done
    return 1
}

# Logs out from all targets.
srp_logout() {
    local p
    for p in /sys/class/srp_remote_ports/*; do
        [ -e "$p/delete" ] && echo 1 >"$p/delete"
    done
    wait_for 30 no_hosts
}

# Returns whether the last ib_srp host was removed, and its disks were flushed. We can't use the
# driver's own attributes of a host, because these are removed before its disks.
no_hosts() {
    ! grep -qs ib_srp /sys/class/scsi_host/host*/proc_name
}

# Cleans up at the end of each SRP case.
srp_clean() {
    end_capture
    # This must also clean up after a failed case, so no command may exit the script.
    (srp_logout) || true
    modprobe -r ib_srp 2>/dev/null || true
    if [ -n "${RISERD:-}" ]; then
        kill -KILL "$RISERD" 2>/dev/null || true
        wait "$RISERD" 2>/dev/null || true
    fi
    # Also removes the state of riserd, because otherwise it would not create disks with the same
    # names again.
    rm -rf "$IMAGES"/disk*.img /var/lib/riserd
    one_host
}

# Verified random I/O on a device: verify DEVICE SIZE [fio arguments …]
verify() {
    local device=$1 size=$2
    shift 2
    fio --name=verify --filename="$device" --size="$size" --rw=randwrite --direct=1 \
        --ioengine=libaio --iodepth=16 --verify=crc32c --verify_fatal=1 --randrepeat=0 \
        --output="$KEEP/fio-$(date +%s%N).txt" "$@"
}

# Runs tests of the transport crate on two devices. All other arguments select tests.
on_devices() {
    local a=$1 b=$2
    shift 2
    (cd /tmp && RISER_SUITE="$a $b" "$RISER_TESTS/devices" "$@")
}

# Runs commands in parallel, which must all succeed.
at_once() {
    local pids=() command pid
    rm -f /tmp/rping-*
    for command in "$@"; do
        ($command) &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || fail "a command failed: $*"
    done
}

# Waits until a process of this shell has exited, either without an error or with any status: ended
# PID [any]
ended() {
    wait_for 120 is_over "$1"
    local status=0
    wait "$1" || status=$?
    [ "${2:-}" = any ] && [ $status -le 4 ] || [ $status = 0 ] || fail "process $1 exited with status $status"
}

is_over() {
    ! kill -0 "$1" 2>/dev/null || grep -qs '^State:.Z' "/proc/$1/status"
}

# Fails if the RDMA device has any queue pair except for the kernel's own queue pair 1.
nothing_left() {
    local left
    left=$(rdma resource show)
    echo "$left"
    grep -q 'pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 0 srq 0' <<<"$left" || fail "objects were not removed"
}

# Creates two hosts, COUNT disks of SIZE MiB, and ib_srp with these module parameters, as used in
# most SRP cases: srp_rig SIZE_MIB COUNT [module parameter …]
srp_rig() {
    local size=$1 count=$2
    shift 2
    two_hosts
    trap srp_clean EXIT
    serve_disks "$size" "$count" "limits: { max_transfer: 8MiB, buffer_pool_mib: 64 }"
    load_srp "$@"
}

# Sets a property of all SRP remote ports: srp_port reconnect_delay 1
srp_port() {
    local p
    for p in /sys/class/srp_remote_ports/*; do
        echo "$2" >"$p/$1"
    done
}

# Starts verified random writes in the background, with a fixed rate and time, which must not fail:
# load DEVICE SECONDS [fio arguments …]
load() {
    local device=$1 seconds=$2
    shift 2
    verify "$device" $((seconds * 200 * 4))k --bs=4k --rate_iops=200 "$@" &
    LOAD=$!
}

# Waits for the load, which must succeed.
loaded() {
    wait "$LOAD" || {
        cat "$KEEP"/fio-*.txt >&2
        fail "the load reported an error"
    }
}

# Returns whether all SRP hosts are logged in.
srp_connected() {
    local p
    for p in /sys/class/srp_remote_ports/*/state; do
        [ "$(cat "$p")" = running ] || return 1
    done
}

# Creates /dev/mapper/paths with all SCSI disks that are LUN 0, using a queue mode (rq or bio).
multipath_over() {
    modprobe -a dm_multipath dm_service_time
    multipath_table "${1:-rq}" | dmsetup create paths
    dmsetup mknodes
    wait_for 10 test -b /dev/mapper/paths
}

# Updates /dev/mapper/paths with the current disks.
multipath_again() {
    dmsetup suspend --noflush --nolockfs paths
    multipath_table "${1:-rq}" | dmsetup load paths
    dmsetup resume paths
}

multipath_table() {
    local d disks=() sectors
    for d in /sys/class/scsi_device/*:0/device/block/*; do
        [ -e "$d/dev" ] && [ "$(cat "$d/device/vendor")" = "RISER   " ] && disks+=("$(cat "$d/dev")")
    done
    sectors=$(cat "/sys/dev/block/${disks[0]}/size")
    echo "0 $sectors multipath 3 queue_if_no_path queue_mode $1 0 1 1 service-time 0 ${#disks[@]} 1 ${disks[*]/%/ 1}"
}

# Removes /dev/mapper/paths, and fails all pending requests.
multipath_end() {
    dmsetup message paths 0 fail_if_no_path 2>/dev/null || true
    dmsetup remove --retry paths 2>/dev/null || true
}

# Three disks, and a multipath device for the first one. Arguments are module parameters of ib_srp.
# This is used in the srp-initiator cases: our own scripts for the same subjects as the SRP group of
# blktests, with the same numbers. PARAMS contains add_target parameters.
three_disks_rig() {
    two_hosts
    trap three_disks_clean EXIT
    serve_disks 64 3 "limits: { max_transfer: 8MiB, buffer_pool_mib: 64 }"
    load_srp indirect_sg_entries=2048 fast_io_fail_tmo=2 reconnect_delay=6 dev_loss_tmo=60 "$@"
    srp_login ${PARAMS:-}
    multipath_over "${MODE:-rq}"
}

three_disks_clean() {
    umount /tmp/mnt 2>/dev/null || true
    multipath_end
    srp_clean
}

# Logs out and in again every few seconds while command "$LOAD" is running. The multipath device
# queues requests during this time.
disconnect_repeatedly() {
    local rounds=$1 i
    for ((i = 0; i < rounds; i++)); do
        sleep 3
        srp_logout
        sleep 1
        srp_login ${PARAMS:-}
        multipath_again "${MODE:-rq}"
    done
}

# Verified writes to files on the multipath device while paths are removed and added.
files_under_disconnects() {
    modprobe ext4
    mkfs.ext4 -q -F /dev/mapper/paths
    mkdir -p /tmp/mnt
    mount /dev/mapper/paths /tmp/mnt
    fio --name=files --directory=/tmp/mnt --numjobs=4 --thread --size=2m --rw=randwrite --bs=4k \
        --direct=1 --ioengine=libaio --iodepth=16 --verify=crc32c --verify_fatal=1 --rate_iops=32 \
        --group_reporting --output="$KEEP/fio-files.txt" &
    LOAD=$!
    disconnect_repeatedly 3
    loaded
    umount /tmp/mnt
    fsck.ext4 -fn /dev/mapper/paths
}

# Verified large transfers: large_transfers BLOCK_SIZE [fio arguments …]
large_transfers() {
    local bs=$1
    shift
    verify /dev/mapper/paths 32m --bs="$bs" --iodepth=4 "$@"
}

# One host: rdma_rxe on a dummy interface with the addresses 10.99.0.1 and, for riserd on the same
# device, 10.99.0.2.
dummy_host() {
    ulimit -l unlimited
    modprobe -a dummy rdma_rxe rdma_ucm ib_umad ib_uverbs
    ip link add d0 type dummy
    ip link set d0 mtu 4200
    ip addr add 10.99.0.1/24 dev d0
    ip addr add 10.99.0.2/24 dev d0
    ip addr add fd99::1/64 dev d0 nodad
    ip addr add fd99::2/64 dev d0 nodad
    ip link set d0 up
    rdma link add rxe0 type rxe netdev d0
    wait_for 20 gid_is_there rxe0 10.99.0.1
    wait_for 20 gid_is_there rxe0 10.99.0.2
    wait_for 20 grep -q 'fd99:.*:0002$' /sys/class/infiniband/rxe0/ports/1/gids/*
    # Wait until the CM knows the addresses.
    sleep 1
}

dummy_clean() {
    srp_clean
    ip link delete d0 2>/dev/null || true
}

# Starts the kernel's SRP target ib_srpt on 10.99.0.1:5555, after `two_hosts`. LUN 0 is a 96 MiB
# file, LUN 1 is a 64 MiB RAM disk. Sets G to its identifier, TARGET to its address with the
# identifier, and PLAIN to its address without it.
kernel_target() {
    mkdir -p /etc/target/pr /var/target/pr
    mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
    modprobe -a target_core_mod target_core_file ib_srpt
    local core=/sys/kernel/config/target/core
    mkdir -p $core/fileio_0/f0 $core/rd_mcp_1/r0
    truncate -s 96M "$IMAGES/srpt.img"
    echo "fd_dev_name=$IMAGES/srpt.img,fd_dev_size=$((96 << 20)),fd_buffered_io=1" >$core/fileio_0/f0/control
    echo "rd_pages=$((64 << 8))" >$core/rd_mcp_1/r0/control
    echo RIG-F0 >$core/fileio_0/f0/wwn/vpd_unit_serial
    echo 1 >$core/fileio_0/f0/enable
    echo 1 >$core/rd_mcp_1/r0/enable
    G=$(sed s/0x// /sys/module/ib_srpt/parameters/srpt_service_guid)
    PLAIN=srp://10.99.0.1
    TARGET="$PLAIN/LUN?id_ext=$G&ioc_guid=$G"
    kernel_port
}

# Creates the port of `kernel_target` on rxe0, which is removed with the device.
kernel_port() {
    local core=/sys/kernel/config/target/core w lun
    w=$(cut -d: -f5-8 /sys/class/infiniband/rxe0/ports/1/gids/0)
    SRPT=/sys/kernel/config/target/srpt/$w/$w
    mkdir -p "$SRPT/lun/lun_0" "$SRPT/lun/lun_1"
    ln -s $core/fileio_0/f0 "$SRPT/lun/lun_0/disk"
    ln -s $core/rd_mcp_1/r0 "$SRPT/lun/lun_1/disk"
    let_in
    echo 1 >"$SRPT/enable"
    echo 5555 >/sys/kernel/config/target/srpt/discovery_auth/rdma_cm_port
}

# Allows access: ib_srpt uses the access list for its own address.
let_in() {
    local lun
    for lun in 0 1; do
        mkdir -p "$SRPT/acls/10.99.0.1/lun_$lun"
        ln -s "$SRPT/lun/lun_$lun" "$SRPT/acls/10.99.0.1/lun_$lun/disk"
    done
}

keep_out() {
    rm "$SRPT"/acls/10.99.0.1/lun_*/disk
    rmdir "$SRPT"/acls/10.99.0.1/lun_* "$SRPT/acls/10.99.0.1"
}

# Creates the port again after its device was removed, because the previous configuration belongs to
# the old device.
kernel_port_again() {
    keep_out
    rm "$SRPT"/lun/lun_*/disk
    rmdir "$SRPT"/lun/lun_* "$SRPT" "$(dirname "$SRPT")"
    kernel_port
}

nothing_attached() {
    [ "$(riser_on roce list -o json)" = "[]" ]
}

# Prints the address of a logical unit of `kernel_target`.
lun() {
    echo "${TARGET/LUN/$1}"
}

# Reverts `kernel_target` and `two_hosts`.
kernel_target_clean() {
    set +e
    end_capture
    riser_on roce list
    echo 0 >"$SRPT/enable"
    keep_out
    rm "$SRPT"/lun/lun_*/disk
    rmdir "$SRPT"/lun/lun_* "$SRPT" "$(dirname "$SRPT")"
    rmdir /sys/kernel/config/target/srpt /sys/kernel/config/target/core/*/[fr]0 /sys/kernel/config/target/core/*_[01]
    modprobe -r ib_srpt
    rm -f "$IMAGES/srpt.img"
    one_host
}

# Runs riser with a provider: roce in namespace `peer`, rdma_core on rxe0.
export RISER_STATE_DIR=/dev/shm/riser-state
riser_on() {
    local provider=$1
    shift
    case $provider in
    # We can't use on_peer, because its mounts would not be visible to other processes.
    roce) RISER_PROVIDER=roce nsenter --net=/run/netns/peer "$RISER_BIN/riser" "$@" ;;
    rdma_core) RISER_PROVIDER=rdma_core "$RISER_BIN/riser" "$@" ;;
    esac
}

# Verified reads and writes using riser: verified_bench PROVIDER URL BLOCK_SIZE TOTAL SIZE
verified_bench() {
    riser_on "$1" bench --overwrite "$2" --rw randrw --mix 40 --bs "$3" --depth 16 --jobs 2 --total "$4" \
        --size "$5" --warm-up 0 --verify --timeout 60s
}

# Runs riser and checks its exit status and output: refused PROVIDER STATUS WORDS ARGUMENT …
refused() {
    local provider=$1 status=$2 words=$3 got=0 text
    shift 3
    text=$(riser_on "$provider" "$@" 2>&1) || got=$?
    echo "$text"
    [ $got = "$status" ] || fail "exit status $got, expected $status: riser $*"
    [[ $(echo "$text" | tr -s ' \n│' ' ') == *"$words"* ]] || fail "the output of riser $* does not contain '$words'"
}
