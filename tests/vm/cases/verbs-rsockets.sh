#: group: verbs
#: about: rsockets between rdma-core's library on rdma_rxe and ours, both roles
#: limit: 300
. "$RISER_ROOT/tests/vm/verbs.sh"
two_hosts
trap one_host EXIT
GID=$(gid_index rxe0 10.99.0.1)
# No udpong: rdma-core makes address handles of datagram sockets without a GID, which RoCE refuses; two
# kernels do not get further.
both "rstream" settle ends "rstream -b {server} -p {port} -T v -S 20000 -I 5 -C 10" \
    "rstream -s {server} -b {client} -p {port} -T v -S 20000 -I 5 -C 10" "Gb/sec"
both "rstream -T n" settle ends "rstream -b {server} -p {port} -T v -T n -S 1000 -I 5 -C 10" \
    "rstream -s {server} -b {client} -p {port} -T v -T n -S 1000 -I 5 -C 10" "Gb/sec"
both "riostream" settle ends "riostream -b {server} -p {port} -T v -S 4096 -I 5 -C 10" \
    "riostream -s {server} -b {client} -p {port} -T v -S 4096 -I 5 -C 10" "Gb/sec"
head -c 1234567 /dev/urandom >/tmp/first
for SERVER in kernel ours; do
    rm -f /tmp/second
    one_way "rcopy" settle asked "rcopy -p {port}" "rcopy /tmp/first {server}:/tmp/second -p {port}" "Gb/sec"
    cmp /tmp/first /tmp/second || FAILED+=("rcopy, server $SERVER: the copy differs")
done
all_passed
nothing_left
