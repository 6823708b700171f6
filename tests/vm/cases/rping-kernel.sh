#: group: transport
#: about: rdma-core's rping over rdma_rxe and ours, both roles, both IP versions, data verified
#: limit: 600
two_hosts
trap 'end_capture; one_host' EXIT
COUNT=${PINGS:-200}

# Ours as the client of rdma-core's rping.
as_client() { # server address, our address, size
    rping -s -a "$1" -C "$COUNT" -S "$3" &
    local server=$!
    sleep 1
    on_peer "$RISER_BIN/riser" rping client "$1" --addr "$2" --count "$COUNT" --size "$3"
    wait $server || true
}

# Ours as the server.
as_server() { # our address, size
    on_peer "$RISER_BIN/riser" rping server --addr "$1" &
    local server=$!
    sleep 1
    rping -c -a "$1" -C "$COUNT" -S "$2" -V
    wait $server
}

capture
for size in 64 65535; do
    as_client 10.99.0.1 10.99.0.2 $size
    as_server 10.99.0.2 $size
    as_client fd99::1 fd99::2 $size
    as_server fd99::2 $size
done
