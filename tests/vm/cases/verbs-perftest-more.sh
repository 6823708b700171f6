#: group: verbs
#: about: perftest between rdma_rxe and our libraries, tests that are not in verbs-perftest, both roles
#: limit: 600
#: short: no
. "$RISER_ROOT/tests/vm/verbs.sh"
two_hosts
trap one_host EXIT
GID=$(gid_index rxe0 10.99.0.1)
perftest ib_send_bw "-c RC -s 20000 -n 20 -t 10"
perftest ib_send_bw "-c RC -e -b -q 2 -s 5000 -n 20 -t 10"
perftest ib_send_bw "-c UC -s 3000 -n 20 -t 10"
perftest ib_send_lat "-c UC -s 3000 -n 10"
perftest ib_send_lat "-c UD -s 1024 -n 10"
perftest ib_write_bw "-c UC -s 3000 -n 20 -t 10"
perftest ib_write_lat "-c RC -s 65536 -n 10"
perftest ib_read_lat "-c RC -s 65536 -n 10 -o 16"
perftest ib_atomic_lat "-c RC -A CMP_AND_SWAP -n 10 -o 16"
all_passed
nothing_left
