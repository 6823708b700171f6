#: group: iwarp
#: about: port mapper for the kernel's iWARP: riser-iwpmd and rdma-core's iwpmd, with siw
#: limit: 300
#: packets: 10
iwarp_hosts
end() {
    [ -z "${MAPPER:-}" ] || kill "$MAPPER" 2>/dev/null || true
    one_host
}
trap end EXIT

# Starts the port mapper on the kernel's side, replacing the previous one: mapper ours|theirs
mapper() {
    [ -z "${MAPPER:-}" ] || { kill "$MAPPER"; wait "$MAPPER" || true; }
    case $1 in
    ours) RUST_LOG=debug "$RISER_BIN/riser-iwpmd" >>"$KEEP/ours.log" 2>&1 & ;;
    theirs) /usr/sbin/iwpmd --systemd & ;;
    esac
    MAPPER=$!
    wait_for 20 listens_at_3935
}

listens_at_3935() {
    ss -Hlnu sport = :3935 | grep -q .
}

# Queries the mapping for an address on the kernel's side, as seen from the other side.
query_mapping() {
    on_peer "$RISER_BIN/riser-iwpmd" query 10.99.0.2:40000 "10.99.0.1:$1"
}

is_mapped() {
    [ "$(query_mapping "$1" 2>/dev/null)" = "10.99.0.1:$1" ]
}

is_rejected() {
    local why
    why=$(query_mapping "$1" 2>&1) && return 1
    [[ $why == *"no mapping"* ]]
}

# TCP servers that are not iWARP devices. One uses the port to which an address of the other side is
# mapped, the other an unmapped port. They record where the kernel connects, and the first bytes
# that it sends.
cat >/tmp/first-bytes.py <<'PY'
import select, socket
servers = [socket.create_server(("10.99.0.2", port)) for port in (7300, 7175)]
while True:
    for server in select.select(servers, [], [])[0]:
        connection, _ = server.accept()
        first = connection.recv(16).decode("ascii", "replace")
        print(server.getsockname()[1], first, flush=True)
        connection.close()
PY

# Checks that the kernel connects to the second port if it uses the first port on the other side:
# comes_to PORT PORT
comes_to() {
    : >/tmp/first-bytes
    timeout 30 rping -c -a 10.99.0.2 -I 10.99.0.1 -p "$1" -C 1 && fail "connected to a program instead of an iWARP device"
    wait_for 20 grep -q "^$2 MPA ID Req Frame" /tmp/first-bytes
}

on_peer "$RISER_BIN/riser-iwpmd" --no-kernel --map 10.99.0.2:7174=7300 >/tmp/peer.log 2>&1 &
peer=$!
on_peer python3 /tmp/first-bytes.py >>/tmp/first-bytes &
server=$!
wait_for 20 grep -q 7300 /tmp/peer.log

for kind in ours theirs; do
    mapper $kind

    # The kernel is listening: its address is registered until the listener is closed.
    rping -s -P -a 10.99.0.1 -p 7174 >/tmp/rping-server 2>&1 &
    rping=$!
    wait_for 30 is_mapped 7174

    # Another port mapper takes over the mappings.
    mapper ours
    wait_for 30 is_mapped 7174
    mapper $kind
    wait_for 30 is_mapped 7174

    # The device connects to itself, so the port mapper sends a query to itself.
    rping -c -a 10.99.0.1 -I 10.99.0.1 -p 7174 -C 20 -V
    kill $rping
    wait $rping || true
    wait_for 30 is_rejected 7174

    # Uses the mapping of the other side's port mapper, or the port itself if there is no mapping.
    comes_to 7174 7300
    comes_to 7175 7175
done
kill $server $peer
grep "registered a kernel client" "$KEEP/ours.log"
