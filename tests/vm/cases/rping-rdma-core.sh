#: group: transport
#: about: riser rping on rdma_core against riser rping on the software NIC, both roles, both IP versions
#: limit: 300
two_hosts
trap 'end_capture; one_host' EXIT
COUNT=${PINGS:-200}
riser() { "$RISER_BIN/riser" "$@"; }

# Ours on rdma-core against ours on the software NIC.
between() { # rxe address, peer address, size
    on_peer "$RISER_BIN/riser" rping server --addr "$2" &
    local server=$!
    sleep 1
    riser rping client "$2" --addr "$1" --provider rdma_core --count "$COUNT" --size "$3"
    wait $server
    riser rping server --addr "$1" --provider rdma_core &
    server=$!
    sleep 1
    on_peer "$RISER_BIN/riser" rping client "$1" --addr "$2" --count "$COUNT" --size "$3"
    wait $server
}

capture
between 10.99.0.1 10.99.0.2 4096
between fd99::1 fd99::2 4096
