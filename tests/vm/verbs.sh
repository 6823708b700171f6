# RDMA programs with one end on rdma_rxe and rdma-core's libraries, at 10.99.0.1, and the other on ours,
# at 10.99.0.2 in namespace `peer`. After `two_hosts`.

# Enough packets to see each program, few enough to judge in seconds.
CAPTURED="-s 400 -c 20000 udp port 4791"

PORT=21000
FAILED=()

# Index of the GID of RoCE version 2 that a device has for an IPv4 address: gid_index DEVICE ADDRESS
gid_index() {
    local port=/sys/class/infiniband/$1/ports/1 hex gid
    hex=$(printf '%02x%02x:%02x%02x' ${2//./ })
    for gid in "$port"/gids/*; do
        gid=${gid##*/}
        grep -qs "ffff:$hex" "$port/gids/$gid" && grep -qs "RoCE v2" "$port/gid_attrs/types/$gid" && echo "$gid" && return
    done
    fail "$1 has no GID for $2"
}

# Starts a program at an end, kernel or ours; sets PID: start END LOG WORD …
start() {
    local end=$1 log=$2
    shift 2
    case $end in
    kernel) (exec stdbuf -oL "$@") >"$log" 2>&1 & ;;
    ours) (exec ip netns exec peer "$RISER_BIN/riser" run --addr 10.99.0.2 -- stdbuf -oL "$@") >"$log" 2>&1 & ;;
    esac
    PID=$!
}

# Whether a process listens at a TCP port.
listens() {
    grep -qsi ":$(printf %04x "$2") [0-9A-F:]* 0A" "/proc/$1/net/tcp" "/proc/$1/net/tcp6"
}

# Waits until a server has loaded its library and sleeps, as it does for a client, or has had three seconds:
# some look for clients all the time.
settle() {
    local before="" now until=0
    while ! is_over "$1"; do
        if [ $until = 0 ]; then
            ! grep -qs "librdmacm\|libriser_drop_in" "/proc/$1/maps" || until=$((SECONDS + 4))
        else
            now=$(cut -d' ' -f3,14,15 "/proc/$1/stat")
            [ "$now" != "$before" ] && [ $SECONDS -lt $until ] || return 0
            [ "${now%% *}" = S ] && before=$now
            sleep 0.5
        fi
    done
}

# Waits until a server listens at a TCP port.
listen() {
    until is_over "$1" || listens "$1" "$2"; do sleep 0.1; done
}

# Words of a command, in which {server} and {client} are addresses, {sdev} and {cdev} options that name
# the device, {sgid} and {cgid} indices of GIDs, and {port} a port of its own.
words() {
    local text=$1 s=10.99.0.1 c=10.99.0.2 sdev="-d rxe0" cdev="-d riser0" sgid=$GID cgid=0
    [ "$SERVER" = kernel ] || s=10.99.0.2 c=10.99.0.1 sdev="-d riser0" cdev="-d rxe0" sgid=0 cgid=$GID
    text=${text//\{server\}/$s} text=${text//\{client\}/$c} text=${text//\{port\}/$PORT}
    text=${text//\{sdev\}/$sdev} text=${text//\{cdev\}/$cdev}
    text=${text//\{sgid\}/$sgid} text=${text//\{cgid\}/$cgid}
    echo "$text"
}

# Runs a server and its client, twice: the server on the kernel's device, then on ours. The client must say
# some words, and both must end without an error; a server that only ends when it is asked to has `asked`
# instead of `ends`. What fails is reported by `all_passed`, after all others have run.
#     both NAME listen|settle ends|asked SERVER CLIENT WORDS
both() {
    local SERVER
    for SERVER in kernel ours; do one_way "$@"; done
}

one_way() {
    local name=$1 ready=$2 end=$3 server client words=$6 began=$EPOCHREALTIME s c wrong="" other=ours
    [ "$SERVER" = kernel ] || other=kernel
    PORT=$((PORT + 1))
    server=$(words "$4") client=$(words "$5")
    start "$SERVER" /tmp/server.log $server
    s=$PID
    $ready $s $PORT
    start "$other" /tmp/client.log $client
    c=$PID
    over $c 60 || wrong="the client does not end"
    [ -n "$wrong" ] || wait $c || wrong="the client ended with $?"
    [ -n "$wrong" ] || grep -q -- "$words" /tmp/client.log || wrong="the client does not say: $words"
    if [ "$end" = asked ] || [ -n "$wrong" ]; then
        kill $s 2>/dev/null || true
        over $s 10 || kill -KILL $s
        wait $s || true
    elif over $s 30; then
        wait $s || wrong="the server ended with $?"
    else
        wrong="the server does not end"
        kill -KILL $s
        wait $s || true
    fi
    if is_over $c; then :; else kill -KILL $c; fi
    local took
    took=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $began }")
    if [ -z "$wrong" ]; then
        echo "ok     $name, server $SERVER ($took s)"
        return
    fi
    echo "FAILED $name, server $SERVER ($took s): $wrong"
    tail -n 15 /tmp/server.log | sed 's/^/    server: /'
    tail -n 15 /tmp/client.log | sed 's/^/    client: /'
    FAILED+=("$name, server $SERVER: $wrong")
}

# Runs a program of perftest each way round: perftest PROGRAM OPTIONS. With -o it is given the number of
# READs and atomics at once: without, each end takes as many as the other one's device holds, and the devices
# differ.
perftest() {
    local says="BW average"
    [ "${1#*_lat}" = "$1" ] || says=t_typical
    both "$1 $2" listen ends "$1 -F {sdev} -x {sgid} -p {port} $2" "$1 -F {cdev} -x {cgid} -p {port} $2 {server}" \
        "$says"
}

# Waits some seconds for the end of a process.
over() {
    local end=$((SECONDS + $2))
    until is_over "$1"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}

# Fails if one of the programs did.
all_passed() {
    [ ${#FAILED[@]} = 0 ] || fail "$(printf '%s\n' "${FAILED[@]}")"
}
