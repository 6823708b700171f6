# Runs RDMA programs where one end uses rdma_rxe and rdma-core's libraries on 10.99.0.1, and the
# other end uses our libraries on 10.99.0.2 in namespace `peer`. Used after `two_hosts`.

# Enough packets to see each program, but few enough to be checked in seconds.
CAPTURED="-s 400 -c 20000 udp port 4791"

PORT=21000
FAILED=()

# Prints the index of the RoCEv2 GID of a device for an IPv4 address: gid_index DEVICE ADDRESS
gid_index() {
    local port=/sys/class/infiniband/$1/ports/1 hex gid
    hex=$(printf '%02x%02x:%02x%02x' ${2//./ })
    for gid in "$port"/gids/*; do
        gid=${gid##*/}
        grep -qs "ffff:$hex" "$port/gids/$gid" && grep -qs "RoCE v2" "$port/gid_attrs/types/$gid" && echo "$gid" && return
    done
    fail "$1 has no GID for $2"
}

# Starts a program on one end (kernel or ours) and sets PID: start END LOG WORD …
start() {
    local end=$1 log=$2
    shift 2
    case $end in
    kernel) exec_in_background "$log" stdbuf -oL "$@" ;;
    ours)
        exec_in_background "$log" nsenter --net=/run/netns/peer \
            "$RISER_BIN/riser" run --addr 10.99.0.2 -- stdbuf -oL "$@"
        ;;
    esac
}

exec_in_background() {
    local log=$1
    shift
    (exec "$@") >"$log" 2>&1 &
    PID=$!
}

# The following functions run many times per second, and creating a process is slow on an emulated
# machine, so they only use builtins.

# A pipe that never contains any data.
exec {NOTHING}<> <(:)

pause() {
    read -r -t "$1" -u "$NOTHING" || true
}

# Sets STATE to the state of a process, and CPU to its CPU time. Fails if it has exited.
look() {
    local text fields
    { read -r text <"/proc/$1/stat"; } 2>/dev/null || return 1
    read -ra fields <<<"${text##*) }"
    STATE=${fields[0]} CPU="${fields[11]} ${fields[12]}"
    [ "$STATE" != Z ]
}

# Waits until a server is listening on a TCP port.
listen() {
    local hex line
    printf -v hex ':%04X [0-9A-F:]* 0A ' "$2"
    while look "$1"; do
        while read -r line; do
            [[ ! $line =~ $hex ]] || return 0
        done < <(cat "/proc/$1/net/tcp" "/proc/$1/net/tcp6" 2>/dev/null)
        pause 0.2
    done
}

# Waits until a server has loaded its library and is sleeping while it waits for a client, or for up
# to four seconds, because some servers poll for clients.
settle() {
    local before="" until=""
    while look "$1"; do
        if [ -z "$until" ]; then
            ! grep -qs "librdmacm\|libriser_drop_in" "/proc/$1/maps" || until=$((SECONDS + 4))
        else
            [ "$STATE $CPU" != "$before" ] && [ $SECONDS -lt "$until" ] || return 0
            [ "$STATE" != S ] || before="$STATE $CPU"
        fi
        pause 0.3
    done
}

# Waits until an mckey receiver has joined the group: it doesn't receive any earlier packets.
receiving() {
    while look "$1" && ! grep -q "receiving data transfers" /tmp/server.log; do pause 0.2; done
}

# Waits for some seconds until a process has exited.
over() {
    local end=$((SECONDS + $2))
    while look "$1"; do
        [ $SECONDS -lt $end ] || return 1
        pause 0.05
    done
}

# Replaces placeholders in a command: {server} and {client} are addresses, {sdev} and {cdev} are
# options that select the device, {sgid} and {cgid} are GID indices, and {port} is a unique port.
words() {
    local text=$1 s=10.99.0.1 c=10.99.0.2 sdev="-d rxe0" cdev="-d riser0" sgid=$GID cgid=0
    [ "$SERVER" = kernel ] || s=10.99.0.2 c=10.99.0.1 sdev="-d riser0" cdev="-d rxe0" sgid=0 cgid=$GID
    text=${text//\{server\}/$s} text=${text//\{client\}/$c} text=${text//\{port\}/$PORT}
    text=${text//\{sdev\}/$sdev} text=${text//\{cdev\}/$cdev}
    text=${text//\{sgid\}/$sgid} text=${text//\{cgid\}/$cgid}
    echo "$text"
}

# Runs a server and its client twice: first with the server on the kernel's device, then on ours.
# The output of the client must contain these words, and both must exit without an error. If a
# server only exits on request, use `asked` instead of `ends`. Failures are reported by `all_passed`
# after all programs have run.
#     both NAME listen|settle|receiving ends|asked SERVER CLIENT WORDS
both() {
    local SERVER
    for SERVER in kernel ours; do one_way "$@"; done
}

# Runs one direction with a receiver that waits for all datagrams. Because a datagram may be lost,
# there is a second attempt.
lossy() {
    local before=("${FAILED[@]}")
    one_way "$@"
    [ ${#FAILED[@]} -gt ${#before[@]} ] || return 0
    FAILED=("${before[@]}")
    one_way "$@"
}

one_way() {
    local name=$1 ready=$2 end=$3 server client words=$6 began=${EPOCHREALTIME/./} s c took wrong="" other=ours
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
    ! look $c || kill -KILL $c
    took=$(((${EPOCHREALTIME/./} - began) / 100000))
    took=${took%?}.${took: -1}
    if [ -z "$wrong" ]; then
        echo "ok     $name, server $SERVER ($took s)"
        return
    fi
    echo "FAILED $name, server $SERVER ($took s): $wrong"
    tail -n 15 /tmp/server.log | sed 's/^/    server: /'
    tail -n 15 /tmp/client.log | sed 's/^/    client: /'
    FAILED+=("$name, server $SERVER: $wrong")
}

# Runs a perftest program in both directions: perftest PROGRAM OPTIONS. With -o, this sets the
# number of outstanding READs and atomics: by default, each end uses the limit of the other device,
# and the limits are different.
perftest() {
    local says="BW average"
    [ "${1#*_lat}" = "$1" ] || says=t_typical
    both "$1 $2" listen ends "$1 -F {sdev} -x {sgid} -p {port} $2" "$1 -F {cdev} -x {cgid} -p {port} $2 {server}" \
        "$says"
}

# Fails if one of the programs has failed.
all_passed() {
    [ ${#FAILED[@]} = 0 ] || fail "$(printf '%s\n' "${FAILED[@]}")"
}
