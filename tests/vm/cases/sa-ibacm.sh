#: group: sa
#: about: Debian's ibacm with our libraries returns the same paths as riser-sa to the kernel and ib_acme
#: limit: 300
#: packets: none
. "$RISER_ROOT/tests/vm/sa.sh"
ib_hosts
trap no_ib_hosts EXIT
administrator

# The port's address, used for one of our devices that is served by ibacm.
ip -n local link add d0 type dummy
ip -n local link set d0 mtu 4500 up
ip -n local address add fd99::1/64 dev d0 nodad
OURS=(nsenter --net=/run/netns/local env RISER_LINK_LAYER=infiniband "$RISER_BIN/riser" run --addr fd99::1 --)

# The kernel waits for ibacm with the same timeout as for riser-sa.
start_sa
stop_sa

mkdir /tmp/ibacm
cat >/tmp/ibacm/opts <<'OPTS'
log_file /vm/keep/ibacm.log
log_level 2
lock_file /tmp/ibacm/pid
addr_prot acm
route_prot sa
support_ips_in_addr_cfg 1
min_mtu 2048
OPTS
echo "fd99::1 riser0 1 default" >/tmp/ibacm/addr
python3 "$RISER_ROOT/tests/vm/sa.py" given /tmp/ibacm/socket -- "${OURS[@]}" \
    ibacm --systemd -O /tmp/ibacm/opts -A /tmp/ibacm/addr >"$KEEP/ibacm.out" 2>&1 &
IBACM=$!
STARTED+=($!)

# Runs a query with ib_acme using this socket: resolves SOCKET
resolves() {
    "${OURS[@]}" ib_acme -S "$1" -f g -s fd99::1 -d fd99::2 -v >/tmp/acme 2>&1
    grep -q "SA verification: success" /tmp/acme
}

# ibacm first joins a group, and rejects all queries until this is complete.
wait_for 60 resolves /tmp/ibacm/socket
tail -n +2 /tmp/acme | tee /tmp/acme-ibacm

before=$(packets)
route fd99::1 fd99::2 | tee /tmp/by-ibacm
[ "$(packets)" = "$before" ] || fail "the kernel sent a query to the administrator"

# When riser-sa replaces ibacm, both queries must return the same result, except for the service
# level, which is 0 in paths from ibacm.
kill $IBACM
wait $IBACM || true
start_sa --source fd99::1 --socket /tmp/riser-sa.socket
resolves /tmp/riser-sa.socket
tail -n +2 /tmp/acme | diff - /tmp/acme-ibacm
route fd99::1 fd99::2 service=0 | diff - /tmp/by-ibacm
[ "$(kernel_queries)" = 1 ] || fail "$(kernel_queries) kernel queries"
[ "$(packets)" = "$before" ] || fail "the kernel sent a query to the administrator"
