#: group: verbs
#: about: librdmacm programs between rdma_rxe and our libraries, with SIDR and multicast, both roles
#: limit: 360
. "$RISER_ROOT/tests/vm/verbs.sh"
two_hosts
trap one_host EXIT
GID=$(gid_index rxe0 10.99.0.1)
# The kernel only joins a group if there is a route to it.
ip route add 239.0.0.0/8 dev v0
on_peer ip route add 239.0.0.0/8 dev v1
both "rping" settle ends "rping -s -V -a {server} -p {port} -C 10" \
    "rping -c -V -v -a {server} -I {client} -p {port} -C 10" "rdma-ping-9: "
both "rping -S 20000" settle ends "rping -s -V -a {server} -p {port} -C 10 -S 20000" \
    "rping -c -V -v -a {server} -I {client} -p {port} -C 10 -S 20000" "rdma-ping-9: "
both "ucmatose" settle ends "ucmatose -b {server} -c 3 -C 10 -S 1000" \
    "ucmatose -s {server} -b {client} -c 3 -C 10 -S 1000" "return status 0"
both "udaddy" settle ends "udaddy -b {server} -c 2 -C 10 -S 1000" \
    "udaddy -s {server} -b {client} -c 2 -C 10 -S 1000" "return status 0"
# mckey exits without waiting for posted requests. rdma_rxe sends the first few of them, and the
# rest is dropped with the queue pair.
for SERVER in kernel ours; do
    [ $SERVER = kernel ] && count=10 || count=1
    lossy "mckey" receiving ends "mckey -m 239.255.17.1 -b {server} -C $count -S 1000" \
        "mckey -m 239.255.17.1 -s -b {client} -C $count -S 1000" "return status 0"
done
both "rdma_client" settle ends "rdma_server -p {port}" "rdma_client -s {server} -p {port}" "end 0"
both "cmtime" settle asked "cmtime -b {server} -p {port} -c 20" \
    "cmtime -s {server} -b {client} -p {port} -c 20" "disconnect"
all_passed
nothing_left
