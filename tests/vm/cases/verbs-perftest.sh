#: group: verbs
#: about: perftest between rdma_rxe and our libraries, each operation and service once, both roles
#: limit: 360
#: short: yes
. "$RISER_ROOT/tests/vm/verbs.sh"
two_hosts
trap one_host EXIT
GID=$(gid_index rxe0 10.99.0.1)
perftest ib_send_lat "-c RC -s 20000 -n 10"
perftest ib_send_bw "-c UD -s 1024 -n 20 -t 10"
perftest ib_write_bw "-c RC -s 65536 -n 20 -t 10"
perftest ib_write_lat "-c UC -s 3000 -n 10"
perftest ib_read_bw "-c RC -s 65536 -n 20 -t 10 -o 16"
perftest ib_atomic_bw "-c RC -A FETCH_AND_ADD -n 20 -o 16"
all_passed
nothing_left
