#: group: sa
#: about: the kernel's RDMA CM on an InfiniBand port: paths from riser-sa with netlink, or with MADs as a fallback
#: limit: 420
. "$RISER_ROOT/tests/vm/sa.sh"
ib_hosts
trap no_ib_hosts EXIT
administrator

# Uses MADs, because no process on this host responds.
before=$(packets)
route fd99::1 fd99::2 class=0x20 | tee /tmp/by-mad
[ "$(packets)" -gt "$before" ] || fail "no packet was sent to the administrator"
for words in "paths 1" "service 0x10615b3" "dgid fd99::2 sgid fd99::1" "hops 64 class 32" "reversible 1 pkey 0xffff" \
    "mtu 5"; do
    grep -q "$words" /tmp/by-mad || fail "the path does not contain $words"
done

# Uses netlink: the same path without any packet.
start_sa --source fd99::1
before=$(packets)
route fd99::1 fd99::2 class=0x20 | diff - /tmp/by-mad
[ "$(kernel_queries)" = 1 ] || fail "$(kernel_queries) kernel queries"
route fd99::1 fd99::2 class=0x20 count=100 | sort -u | diff - /tmp/by-mad
[ "$(kernel_queries)" = 101 ] || fail "$(kernel_queries) kernel queries"
[ "$(packets)" = "$before" ] || fail "the administrator also received a query"

# ib_srp requests the path to its target and reaches the target, which is a NIC without this service
# (REJ reason 8).
pings
modprobe ib_srp
add=/sys/class/infiniband_srp/srp-ibrxe0-1/add_target
wait_for 20 test -e $add
id=0200c0ffee000001
echo "id_ext=$id,ioc_guid=$id,dgid=fd990000000000000000000000000002,pkey=ffff,service_id=$id" >$add && fail "the login succeeded"
[ "$(kernel_queries)" = 102 ] || fail "$(kernel_queries) kernel queries"
dmesg | grep "ib_srp: REJ received" || fail "no response from the target"
modprobe -r ib_srp

# If the source is unknown, riser-sa rejects the query, and the kernel immediately sends it to the
# administrator.
stop_sa
start_sa
before=$(kernel_queries)
route fd99::1 fd99::2 class=0x20 | diff - /tmp/by-mad
[ "$(kernel_queries)" -gt "$before" ] || fail "riser-sa received no query"
stop_sa

# If there is no response, the kernel sends the query to the administrator after the configured
# timeout.
waits() {
    local began took
    WAIT=$1 start_sa --source fd99::1
    kill -STOP $LOCAL
    began=${EPOCHREALTIME/./}
    route fd99::1 fd99::2 class=0x20 timeout=60000 | diff - /tmp/by-mad
    took=$(((${EPOCHREALTIME/./} - began) / 1000))
    echo "response after $took ms with a timeout of $1 ms"
    [ $took -ge "$1" ] || fail "the kernel did not wait for the timeout"
    kill -KILL $LOCAL
    wait $LOCAL || true
}
waits 1000
# Longer than the default timeout of the kernel, which is two seconds.
waits 6000

# If riser-sa is restarted during queries, each query must get a response from either of them.
WAIT=500
start_sa --source fd99::1
(for i in {1..12}; do route fd99::1 fd99::2 class=0x20 count=100 timeout=60000; done) >/tmp/load &
load=$!
for i in {1..4}; do
    sleep 2
    kill -KILL $LOCAL
    wait $LOCAL || true
    sleep 1
    start_sa --source fd99::1
done
wait $load
[ "$(wc -l </tmp/load)" = 1200 ] || fail "$(wc -l </tmp/load) responses"
sort -u /tmp/load | diff - /tmp/by-mad
echo "result: $(kernel_queries) kernel queries with netlink, all other queries with MADs"
