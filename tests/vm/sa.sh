# Functions for an InfiniBand port on Linux that requests paths, and for the services that respond.

# Creates two hosts: v0 has the ib_rxe port (xtask/cases/modules.toml) with GID fd99::1, and
# namespace `peer` has the addresses fd99::2 and fd99::200:0:0:2, which is used by the
# administrator. Namespace `local` is for programs on the kernel's host with their own InfiniBand
# device.
ib_hosts() {
    modprobe -a veth ib_rxe rdma_ucm ib_umad ib_uverbs
    ip netns add local
    ip -n local link set lo up
    ip netns add peer
    PEER=(ip netns exec peer)
    ip link add v0 type veth peer name v1
    ip link set v1 netns peer
    on_peer ip link set lo up
    ip link set v0 mtu 4500 up
    on_peer ip link set v1 mtu 4500 up
    ip addr add fd99::1/64 dev v0 nodad
    on_peer ip addr add fd99::2/64 dev v1 nodad
    on_peer ip addr add fd99::200:0:0:2/64 dev v1 nodad
    # Captures packets for queue pair 1. All other packets are sent by the kernel for IPoIB.
    CAPTURED='-s 400 -c 20000 udp port 4791 and ip6[52:4]&0xffffff=1' capture
    rdma link add ibrxe0 type ib_rxe netdev v0
    wait_for 20 grep -q ACTIVE /sys/class/infiniband/ibrxe0/ports/1/state
}

# Reverts `ib_hosts`.
no_ib_hosts() {
    end_capture
    local pid
    for pid in "${STARTED[@]}"; do
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    modprobe -r ib_ipoib ib_srp 2>/dev/null || true
    rdma link delete ibrxe0 2>/dev/null || true
    # It uses the RoCE port in this namespace.
    modprobe -r ib_rxe 2>/dev/null || true
    ip netns delete local 2>/dev/null || true
    one_host
}

# Background processes.
STARTED=()

# Starts subnet administration on the administrator's address.
administrator() {
    ip netns exec peer "$RISER_BIN/riser-sa" --no-netlink --addr fd99::200:0:0:2 >>"$KEEP/administrator.log" 2>&1 &
    STARTED+=($!)
    wait_for 60 grep -q 'is running' "$KEEP/administrator.log"
}

# Starts riser-sa for the kernel, with a socket in this namespace: start_sa OPTION …. The kernel's
# timeout is long enough for a busy machine, or $WAIT milliseconds.
start_sa() {
    local before
    before=$(grep -c ' is running ' "$KEEP/local.log" 2>/dev/null || true)
    RISER_LOG=debug python3 "$RISER_ROOT/tests/vm/sa.py" given -- ip netns exec local \
        "$RISER_BIN/riser-sa" --addr ::1 --kernel-timeout "${WAIT:-60000}" "$@" >>"$KEEP/local.log" 2>&1 &
    LOCAL=$!
    STARTED+=($!)
    wait_for 60 says_more "${before:-0}"
}

says_more() {
    [ "$(grep -c ' is running ' "$KEEP/local.log")" -gt "$1" ]
}

stop_sa() {
    kill "$LOCAL"
    wait "$LOCAL" || true
}

# Starts one of our NICs on the other host, fd99::2, with an rping server.
pings() {
    ip netns exec peer "$RISER_BIN/riser" -v rping server --addr fd99::2 >"$KEEP/rping.log" 2>&1 &
    PINGS=$!
    STARTED+=($!)
    wait_for 60 grep -q listening "$KEEP/rping.log"
}

# Prints the number of kernel queries received so far.
kernel_queries() {
    grep -c 'received a kernel request' "$KEEP/local.log" || true
}

# Sends a kernel query: route SOURCE DESTINATION [OPTION=NUMBER …]
route() {
    timeout 100 python3 "$RISER_ROOT/tests/vm/sa.py" route "$@"
}

# Prints the number of packets sent by the port.
packets() {
    cat /sys/class/infiniband/ibrxe0/ports/1/hw_counters/sent_pkts
}
