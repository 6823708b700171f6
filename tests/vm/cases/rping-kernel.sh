#: group: transport
#: about: rdma-core's rping over rdma_rxe and ours on the software NIC, both roles, IPv4 and IPv6
#: limit: 900
two_hosts
trap one_host EXIT
# Additional addresses, so that all four runs can be done at the same time.
on_peer ip addr add 10.99.0.3/24 dev v1
on_peer ip addr add fd99::3/64 dev v1 nodad

# Our client with the server of rdma-core's rping.
as_client() { # server address, our address, size, count
    rping -s -a "$1" -C "$4" -S "$3" &
    local server=$!
    sleep 2
    on_peer "$RISER_BIN/riser" rping client "$1" --addr "$2" --count "$4" --size "$3"
    wait $server || true
}

# Our server, which exits after its client has disconnected.
as_server() { # our address, size, count
    ip netns exec peer "$RISER_BIN/riser" -v rping server --addr "$1" 2>"/tmp/rping-$1" &
    local server=$!
    wait_for 30 grep -q listening "/tmp/rping-$1"
    rping -c -a "$1" -C "$3" -S "$2" -V
    ended $server
}

# The kernel replies with an MRA to a repeated REQ or REP that its program has not processed yet. A stopped
# program processes nothing.
sent_mras() { # count
    [ "$(cat /sys/class/infiniband/rxe0/ports/1/cm_tx_msgs/mra)" -ge "$1" ]
}

# REQ of our client.
rping -s -a 10.99.0.1 -C 10 &
SERVER=$!
sleep 2
kill -STOP $SERVER
on_peer "$RISER_BIN/riser" rping client 10.99.0.1 --addr 10.99.0.2 --count 10 &
CLIENT=$!
wait_for 30 sent_mras 1
kill -CONT $SERVER
wait $CLIENT || fail "our client failed after an MRA"
wait $SERVER || true
after_req=$(cat /sys/class/infiniband/rxe0/ports/1/cm_tx_msgs/mra)

# REP of our server. Stop it until the kernel has sent the REQ, and the client before it can receive the REP.
ip netns exec peer "$RISER_BIN/riser" -v rping server --addr 10.99.0.3 2>/tmp/rping-mra &
SERVER=$!
wait_for 30 grep -q listening /tmp/rping-mra
kill -STOP $SERVER
rping -c -a 10.99.0.3 -C 10 -V &
CLIENT=$!
sleep 3
kill -STOP $CLIENT
kill -CONT $SERVER
wait_for 30 sent_mras $((after_req + 1))
kill -CONT $CLIENT
# rping can fail after the last ping, when it closes the channel that its thread still reads. Our server checks
# the pings.
wait $CLIENT || true
ended $SERVER

for size in 64:2000 65535:100; do
    at_once "as_client 10.99.0.1 10.99.0.2 ${size/:/ }" "as_server 10.99.0.3 ${size/:/ }" \
        "as_client fd99::1 fd99::2 ${size/:/ }" "as_server fd99::3 ${size/:/ }"
done

end_capture
# Prints the number of captured MRAs for a message: CM MADs (class 7) with attribute 0x11, over IPv4.
captured_mras() {
    tcpdump -r "$KEEP/packets.pcap" "src 10.99.0.1 and udp[29] = 7 and udp[44:2] = 0x11 and udp[60] & 0xc0 = $1" \
        2>/dev/null | wc -l
}
req=$(captured_mras 0) rep=$(captured_mras 0x40)
[ "$req" -ge 1 ] && [ "$rep" -ge 1 ] || fail "captured MRAs: $req for REQ, $rep for REP"
echo "result: the kernel sent $req MRAs for REQ and $rep for REP"
