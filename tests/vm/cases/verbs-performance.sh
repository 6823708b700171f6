#: group: verbs
#: about: performance of our libraries compared to rdma_rxe, with rdma_rxe as the peer
#: limit: 900
#: alone: yes
#: short: no
#: packets: none
. "$RISER_ROOT/tests/vm/verbs.sh"
trap one_host EXIT

# Runs perftest between the peer on rxe0 and a device (riser0 or rxe1), and prints a column of the
# client's results: result COLUMN SERVER CLIENT PROGRAM ARGUMENT …
result() {
    local column=$1 server=$2 client=$3 s address=10.99.0.2 value="" tries
    shift 3
    [ "$server" != rxe0 ] || address=10.99.0.1
    # If a program detects that the clock of the emulated processor is not stable, it doesn't print
    # any latencies.
    for ((tries = 0; tries < 5; tries++)); do
        PORT=$((PORT + 1))
        start "$(end_of "$server")" /tmp/server.log "$@" -d "$server" -x "$(index_of "$server")" -p $PORT
        s=$PID
        listen $s $PORT
        start "$(end_of "$client")" /tmp/client.log "$@" -d "$client" -x "$(index_of "$client")" -p $PORT $address
        over $PID 120 && over $s 30 || break
        wait $PID && wait $s || true
        value=$(awk -v column="$column" '/^ *[0-9]+ +[0-9]+ +[0-9.]+ / { print $column }' /tmp/client.log)
        [ -z "$value" ] || break
    done
    if [ -z "$value" ]; then
        cat /tmp/server.log /tmp/client.log >&2
        fail "$* from $client to $server has no results"
    fi
    echo "$value"
}

end_of() {
    case $1 in riser0) echo ours ;; *) echo kernel ;; esac
}

index_of() {
    case $1 in
    riser0) echo 0 ;;
    rxe0) gid_index rxe0 10.99.0.1 ;;
    rxe1) gid_index rxe1 10.99.0.2 ;;
    esac
}

note() {
    [ -n "$3" ] || fail "there are no results"
    echo "$@"
}

# All results of a device, in both directions.
measure() {
    local device=$1 round
    for round in 1 2 3; do
        note "$device" write-to "$(result 4 rxe0 "$device" ib_write_bw -F -s 65536 -n 200 -t 32)"
        note "$device" write-from "$(result 4 "$device" rxe0 ib_write_bw -F -s 65536 -n 200 -t 32)"
        note "$device" latency "$(result 5 rxe0 "$device" ib_send_lat -F -s 8 -n 300)"
    done
}

# A packet capture would affect the results.
CAPTURE=none
two_hosts
measure riser0 >/tmp/results
one_host
# We can't use a separate namespace here, because rdma_rxe only supports the initial one.
PEER=() CORE=yes CAPTURE=none
two_hosts
measure rxe1 >>/tmp/results
cp /tmp/results "$KEEP"
python3 - <<'P'
import collections, statistics
results = collections.defaultdict(list)
for line in open("/tmp/results"):
    device, what, value = line.split()
    results[device, what].append(float(value))
for what, name, unit in (
    ("write-to", "ib_write_bw of 64 KiB to rdma_rxe", "MiB/s"),
    ("write-from", "ib_write_bw of 64 KiB from rdma_rxe", "MiB/s"),
    ("latency", "ib_send_lat of 8 bytes to rdma_rxe", "µs"),
):
    ours, theirs = (statistics.median(results[device, what]) for device in ("riser0", "rxe1"))
    print(f"result: {name}: ours {ours:.1f} {unit}, rdma_rxe {theirs:.1f} {unit}, ratio {ours / theirs:.2f}")
P
