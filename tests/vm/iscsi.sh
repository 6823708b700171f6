# Functions for cases with the kernel's iSCSI initiator (open-iscsi), over TCP or iSER. A case must
# set TRANSPORT to tcp or iser, set CORE to yes if riserd should use rdma_core, and then read this
# file. DISK_KEYS contains additional keys of the disk, if any.
IQN=iqn.2026-01.com.example:rig
HOST=iqn.2026-01.com.example:host
PORTAL=10.99.0.2:3260
case $TRANSPORT in
# To follow a stream, we need complete segments.
tcp) PROTOCOL=iscsi MODULE=iscsi_tcp IFACE=default CAPTURED="-s 0 -c 10000 tcp port 3260" ;;
# Logins are longer than the default of 400 bytes.
iser) PROTOCOL=iser MODULE=ib_iser IFACE=iser CAPTURED="-s 1000 -c 100000 udp port 4791" ;;
esac

# Two hosts, one disk with this size in MiB, and the kernel's initiator. The remaining arguments are
# lines of the target's configuration.
iscsi_rig() {
    local size=$1
    shift
    two_hosts
    trap iscsi_clean EXIT
    iscsi_serve "$size" "10.99.0.2" "$@"
    start_iscsid
}

# Starts riserd with portals on these addresses: iscsi_serve SIZE_MIB "ADDRESS …" [line …]
iscsi_serve() {
    iscsi_config "$@" >/tmp/disks.yaml
    serve </tmp/disks.yaml
}

iscsi_config() {
    local size=$1 addresses=$2 address
    shift 2
    echo "backends:"
    echo "  disk0: { kind: file, path: $IMAGES/disk0.img, size: ${size}MiB, create: true, serial: RIG-0${DISK_KEYS:-} }"
    echo "targets:"
    echo "  - name: rig"
    echo "    iqn: $IQN"
    echo "    portals:"
    for address in $addresses; do echo "      - { protocol: $PROTOCOL, listen: $address }"; done
    # Discovery always uses TCP, for sessions with any transport.
    [ $PROTOCOL = iscsi ] || echo "      - { protocol: iscsi, listen: 10.99.0.2 }"
    echo "    luns: { 0: disk0 }"
    echo "    access: open"
    for line in "$@"; do echo "$line"; done
}

start_iscsid() {
    modprobe -a sd_mod $MODULE
    mkdir -p /run/lock/iscsi /etc/iscsi
    echo "InitiatorName=$HOST" >/etc/iscsi/initiatorname.iscsi
    rm -rf /etc/iscsi/nodes /etc/iscsi/send_targets
    # When it exits, it sends a signal to its process group.
    setsid iscsid -f >>"$KEEP/iscsid.log" 2>&1 &
    ISCSID=$!
    wait_for 20 iscsid_responds
}

# Returns whether the daemon responds. Exit status 21 means that there are no sessions.
iscsid_responds() {
    local status=0
    iscsiadm -m session || status=$?
    [ $status = 0 ] || [ $status = 21 ]
}

# Creates a record for the target and a portal: iscsi_node [PORTAL]
iscsi_node() {
    iscsiadm -m node -T $IQN -p "${1:-$PORTAL}" -o new -I $IFACE >/dev/null
}

# Sets values in the record: iscsi_set NAME VALUE …
iscsi_set() {
    while [ $# -gt 0 ]; do
        iscsiadm -m node -T $IQN -o update -n "$1" -v "$2"
        shift 2
    done
}

# Tries to log in. Returns the exit status of iscsiadm. rdma_rxe (6.12) processes responses and
# acknowledgements in parallel, so a response may be processed before the acknowledgement of its
# request. In this case the only login task of ib_iser remains in use for the rest of the session.
# The login has neither succeeded nor failed, so we create another session.
iscsi_attempt() {
    local status left=3 before
    [ $IFACE = default ] || iscsi_set node.session.initial_login_retry_max 1
    while :; do
        status=0
        before=$(logins_stuck)
        iscsiadm -m node -T $IQN ${1:+-p $1} -I $IFACE -l || status=$?
        left=$((left - 1))
        if [ $status = 0 ] || [ $IFACE = default ] || [ $left = 0 ]; then return $status; fi
        [ "$(logins_stuck)" -gt "$before" ] || return $status
        echo "result: the kernel's login task was in use; creating another session"
    done
}

# Prints how many times the kernel has reported that a login task was in use.
logins_stuck() {
    dmesg | grep -c 'Login/Text in progress' || true
}

# Logs in using the record, to one portal or to all. Sets DISK.
iscsi_login() {
    iscsi_attempt "$@"
    wait_for 60 find_disk 0
    find_disk 0
}

iscsi_logout() {
    iscsiadm -m node -T $IQN -u
    wait_for 30 no_disk
}

no_disk() {
    ! find_disk 0
}

# Tries a login that must fail with this exit status of iscsiadm: 24 if it's rejected by riserd, 19
# if it's rejected by the kernel.
iscsi_refused() {
    local want=$1 status=0
    iscsi_attempt || status=$?
    [ $status = "$want" ] || fail "iscsiadm exited with status $status, expected $want"
}

# Prints a field of the only connection in riserd: agreed FIELD
agreed() {
    on_peer "$RISER_BIN/riserd" sessions -o json |
        python3 -c 'import json,sys; s=json.load(sys.stdin); print(s[0]["negotiated"][sys.argv[1]])' "$1"
}

# Prints the number of connections in riserd.
connections() {
    on_peer "$RISER_BIN/riserd" sessions -o json | python3 -c 'import json,sys; print(len(json.load(sys.stdin)))'
}

no_connections() {
    [ "$(connections)" = 0 ]
}

# Returns whether all kernel sessions are logged in.
iscsi_connected() {
    local s
    for s in /sys/class/iscsi_session/*/state; do
        [ "$(cat "$s")" = LOGGED_IN ] || return 1
    done
}

iscsi_clean() {
    set +e
    end_capture
    iscsiadm -m node -u >/dev/null 2>&1
    if [ -n "${ISCSID:-}" ]; then
        kill "$ISCSID"
        wait "$ISCSID"
    fi
    modprobe -r $MODULE
    if [ -n "${RISERD:-}" ]; then
        kill -KILL "$RISERD" 2>/dev/null
        wait "$RISERD" 2>/dev/null
    fi
    # Also removes the state of riserd, because otherwise it would not create disks with the same
    # names again.
    rm -rf "$IMAGES"/disk*.img /var/lib/riserd /etc/iscsi/nodes /etc/iscsi/send_targets
    one_host
}

# --- cases for both transports ---

discover_and_login() {
    iscsi_rig 64
    iscsiadm -m discovery -t sendtargets -p $PORTAL | tee /tmp/found
    grep -q "^10.99.0.2:3260,[0-9]* $IQN$" /tmp/found || fail "the target was not found"
    # Discovery has created other records.
    iscsiadm -m node -o delete
    iscsi_node
    iscsi_login
    [ "$(blockdev --getsize64 "$DISK")" = $((64 << 20)) ] || fail "unexpected size"
    [[ $(cat "/sys/block/${DISK#/dev/}/device/vendor") == RISER* ]] || fail "unexpected vendor"
    grep -q RIG-0 "/sys/block/${DISK#/dev/}/device/vpd_pg80" || fail "unexpected serial number"
    [ "$(connections)" = 1 ] || fail "riserd does not list the session"
    verify "$DISK" 4m --bs=4k
    iscsi_logout
    wait_for 10 no_connections
    stop_serving
}

chap_both_ways() {
    mkdir -p /tmp/secrets
    echo -n "twelve bytes and more" >/tmp/secrets/host
    iscsi_rig 32 \
        "    chap:" \
        "      users: [{ name: host, secret_file: /tmp/secrets/host }]" \
        "      mutual: { name: rig, secret: another-secret-of-ours }"
    iscsi_node
    echo "--- no secret"
    iscsi_refused 24
    echo "--- a wrong secret"
    iscsi_set node.session.auth.authmethod CHAP node.session.auth.username host \
        node.session.auth.password "not the right secret"
    iscsi_refused 24
    echo "--- one-way"
    iscsi_set node.session.auth.password "twelve bytes and more"
    iscsi_login
    verify "$DISK" 1m --bs=4k
    iscsi_logout
    echo "--- mutual, and riserd uses the wrong secret"
    iscsi_set node.session.auth.username_in rig node.session.auth.password_in "not what riserd knows"
    iscsi_refused 19
    echo "--- mutual"
    iscsi_set node.session.auth.password_in another-secret-of-ours
    for algorithm in MD5 SHA1 SHA256 SHA3-256; do
        iscsi_set node.session.auth.chap_algs $algorithm
        iscsi_login
        verify "$DISK" 1m --bs=4k
        iscsi_logout
    done
    stop_serving
}

# Verified I/O with all combinations of settings for data transfers. Digests are only supported with
# TCP.
every_negotiation() {
    local digests=None digest r2t immediate burst
    [ $TRANSPORT = tcp ] && digests="None CRC32C"
    iscsi_rig 32 "limits: { max_transfer: 8MiB }"
    iscsi_node
    for digest in $digests; do
        for r2t in Yes No; do
            for immediate in Yes No; do
                for burst in 8192 65536 1048576; do
                    iscsi_set node.conn[0].iscsi.HeaderDigest $digest \
                        node.conn[0].iscsi.DataDigest $digest \
                        node.session.iscsi.InitialR2T $r2t \
                        node.session.iscsi.ImmediateData $immediate \
                        node.session.iscsi.MaxBurstLength $burst \
                        node.session.iscsi.FirstBurstLength $((burst < 65536 ? burst : 65536))
                    iscsi_login
                    for pair in "HeaderDigest $digest" "InitialR2T $r2t" "ImmediateData $immediate" \
                        "MaxBurstLength $burst"; do
                        set -- $pair
                        [ "$(agreed "$1")" = "$2" ] || fail "$1 is $(agreed "$1"), not $2"
                    done
                    verify "$DISK" 2m --bsrange=512-256k --iodepth=8
                    iscsi_logout
                done
            done
        done
    done
    stop_serving
}

io_of_every_size() {
    iscsi_rig 64 "limits: { max_transfer: 8MiB, buffer_pool_mib: 64 }"
    iscsi_node
    iscsi_login
    for bs in 512 4k 60k 1m 4m; do
        size=$([ "$bs" = 512 ] && echo 512k || { [ "$bs" = 4k ] && echo 4m || echo 24m; })
        verify "$DISK" "$size" --bs="$bs" --iodepth=8
    done
    verify "$DISK" 16m --bsrange=512-256k --iodepth=8
    iscsi_logout
    stop_serving
}

file_system() {
    modprobe ext4
    iscsi_rig 256
    iscsi_node
    iscsi_login
    mkfs.ext4 -q -F "$DISK"
    mkdir -p /tmp/mnt
    mount "$DISK" /tmp/mnt
    cp -a /usr/share/perl/5* /tmp/mnt/ 2>/dev/null || cp -a /usr/lib/python3 /tmp/mnt/
    (cd /tmp/mnt && find . -type f -print0 | sort -z | xargs -0 sha256sum) >/tmp/sums
    umount /tmp/mnt
    iscsi_logout
    iscsi_login
    fsck.ext4 -fn "$DISK"
    mount "$DISK" /tmp/mnt
    (cd /tmp/mnt && sha256sum --quiet -c /tmp/sums)
    [ "$(wc -l </tmp/sums)" -gt 100 ] || fail "too few files were copied"
    umount /tmp/mnt
    iscsi_logout
    stop_serving
}

# The target exits normally, and is killed, during writes: no data must be lost.
target_restarts() {
    iscsi_rig 64
    iscsi_node
    iscsi_set node.session.timeo.replacement_timeout 120
    iscsi_login
    load "$DISK" 20
    sleep 4
    stop_serving
    sleep 1
    serve_again
    wait_for 60 iscsi_connected
    sleep 3
    kill_serving
    sleep 1
    serve_again
    wait_for 60 iscsi_connected
    loaded
    iscsi_logout
    stop_serving
}

# The link is cut: the kernel detects this with NOPs, and reconnects.
link_is_cut() {
    iscsi_rig 64
    iscsi_node
    iscsi_set node.session.timeo.replacement_timeout 120 \
        node.conn[0].timeo.noop_out_interval 2 node.conn[0].timeo.noop_out_timeout 2
    iscsi_login
    load "$DISK" 20
    sleep 3
    far_link down
    not_connected() { ! iscsi_connected; }
    wait_for 60 not_connected
    sleep 1
    far_link up
    wait_for 90 iscsi_connected
    loaded
    iscsi_logout
    stop_serving
}

# Two portals, where one is disconnected and reconnected during writes.
two_paths_one_cut() {
    two_hosts
    trap iscsi_clean EXIT
    on_peer ip addr add 10.99.0.3/24 dev v1
    iscsi_serve 64 "10.99.0.2 10.99.0.3"
    start_iscsid
    iscsi_node
    iscsi_node 10.99.0.3:3260
    iscsi_set node.session.timeo.replacement_timeout 4 \
        node.conn[0].timeo.noop_out_interval 2 node.conn[0].timeo.noop_out_timeout 2
    iscsi_login
    two_paths() { [ "$(multipath_table rq | grep -o 'service-time 0 2')" ]; }
    wait_for 30 two_paths
    multipath_over bio
    load /dev/mapper/paths 20
    sleep 3
    on_peer ip addr del 10.99.0.3/24 dev v1
    one_path() { dmsetup status paths | grep -q ' F '; }
    wait_for 60 one_path
    sleep 2
    on_peer ip addr add 10.99.0.3/24 dev v1
    wait_for 90 iscsi_connected
    for d in /sys/class/scsi_device/*:0/device/block/*/dev; do
        dmsetup message paths 0 reinstate_path "$(cat "$d")"
    done
    loaded
    multipath_end
    iscsi_logout
    stop_serving
}
