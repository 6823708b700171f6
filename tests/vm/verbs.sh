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

# What follows runs many times a second, and a process takes an emulated machine a while: so builtins only.

# A pipe in which nothing ever comes.
exec {NOTHING}<> <(:)

pause() {
    read -r -t "$1" -u "$NOTHING" || true
}

# Sets STATE to the state of a process, and CPU to the time that it has used; fails when it has ended.
look() {
    local text fields
    { read -r text <"/proc/$1/stat"; } 2>/dev/null || return 1
    read -ra fields <<<"${text##*) }"
    STATE=${fields[0]} CPU="${fields[11]} ${fields[12]}"
    [ "$STATE" != Z ]
}

# Waits until a server listens at a TCP port.
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

# Waits until a server has loaded its library and sleeps, as it does for a client, or has had four seconds:
# some look for clients all the time.
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

# Waits until a receiver of mckey has joined the group: what is sent before does not reach it.
receiving() {
    while look "$1" && ! grep -q "receiving data transfers" /tmp/server.log; do pause 0.2; done
}

# Waits some seconds for the end of a process.
over() {
    local end=$((SECONDS + $2))
    while look "$1"; do
        [ $SECONDS -lt $end ] || return 1
        pause 0.05
    done
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
#     both NAME listen|settle|receiving ends|asked SERVER CLIENT WORDS
both() {
    local SERVER
    for SERVER in kernel ours; do one_way "$@"; done
}

# One direction, for a receiver that waits for every datagram. One may be lost, so there is a second attempt.
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

# Runs a program of perftest each way round: perftest PROGRAM OPTIONS. With -o it is given the number of
# READs and atomics at once: without, each end takes as many as the other one's device holds, and the devices
# differ.
perftest() {
    local says="BW average"
    [ "${1#*_lat}" = "$1" ] || says=t_typical
    both "$1 $2" listen ends "$1 -F {sdev} -x {sgid} -p {port} $2" "$1 -F {cdev} -x {cgid} -p {port} $2 {server}" \
        "$says"
}

# Fails if one of the programs did.
all_passed() {
    [ ${#FAILED[@]} = 0 ] || fail "$(printf '%s\n' "${FAILED[@]}")"
}
