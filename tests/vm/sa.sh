# Linux's port of InfiniBand, which asks for paths, and what answers it.

# Two hosts: on v0 the port, of ib_rxe (xtask/src/interop/modules.rs), with the GID fd99::1, and namespace
# `peer` with the addresses fd99::2 and fd99::200:0:0:2, the administrator's. Namespace `local` is for
# programs of the kernel's host that have an InfiniBand of their own.
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
    # What goes to queue pair 1: the rest is the kernel's own, of IPoIB.
    CAPTURED='-s 400 -c 20000 udp port 4791 and ip6[52:4]&0xffffff=1' capture
    rdma link add ibrxe0 type ib_rxe netdev v0
    wait_for 20 grep -q ACTIVE /sys/class/infiniband/ibrxe0/ports/1/state
}

# Undoes it.
no_ib_hosts() {
    end_capture
    local pid
    for pid in "${STARTED[@]}"; do
        kill -KILL "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    modprobe -r ib_ipoib ib_srp 2>/dev/null || true
    rdma link delete ibrxe0 2>/dev/null || true
    # It has the port of RoCE in this namespace.
    modprobe -r ib_rxe 2>/dev/null || true
    ip netns delete local 2>/dev/null || true
    one_host
}

# What has been started in the background.
STARTED=()

# Subnet administration at the port's administrator.
administrator() {
    ip netns exec peer "$RISER_BIN/riser-sa" --no-netlink --addr fd99::200:0:0:2 >>"$KEEP/administrator.log" 2>&1 &
    STARTED+=($!)
    wait_for 60 grep -q answers "$KEEP/administrator.log"
}

# riser-sa for the kernel, with a socket from this namespace: answers OPTION …. The kernel waits for it as
# long as a busy machine needs, or $WAIT milliseconds.
answers() {
    local before
    before=$(grep -c ' answers ' "$KEEP/local.log" 2>/dev/null || true)
    RISER_LOG=debug python3 "$RISER_ROOT/tests/vm/sa.py" given -- ip netns exec local \
        "$RISER_BIN/riser-sa" --addr ::1 --kernel-timeout "${WAIT:-60000}" "$@" >>"$KEEP/local.log" 2>&1 &
    LOCAL=$!
    STARTED+=($!)
    wait_for 60 says_more "${before:-0}"
}

says_more() {
    [ "$(grep -c ' answers ' "$KEEP/local.log")" -gt "$1" ]
}

answers_no_more() {
    kill "$LOCAL"
    wait "$LOCAL" || true
}

# A NIC of ours at the other host, fd99::2, with a server of rping.
pings() {
    ip netns exec peer "$RISER_BIN/riser" -v rping server --addr fd99::2 >"$KEEP/rping.log" 2>&1 &
    PINGS=$!
    STARTED+=($!)
    wait_for 60 grep -q listening "$KEEP/rping.log"
}

# Questions of the kernel that it has got so far.
asked() {
    grep -c 'the kernel asks' "$KEEP/local.log" || true
}

# The kernel asks: route SOURCE DESTINATION [OPTION=NUMBER …]
route() {
    timeout 100 python3 "$RISER_ROOT/tests/vm/sa.py" route "$@"
}

# Packets that the port has sent.
packets() {
    cat /sys/class/infiniband/ibrxe0/ports/1/hw_counters/sent_pkts
}
