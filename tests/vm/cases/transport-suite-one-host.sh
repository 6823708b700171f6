#: group: transport
#: about: the provider suite, rdma_core with itself on one device
#: limit: 600
#: short: no
two_hosts
trap one_host EXIT
ip addr add 10.99.0.5/24 dev v0
wait_for 20 grep -q 0a63:0005 /sys/class/infiniband/rxe0/ports/1/gids/*
on_devices rdma_core:10.99.0.1 rdma_core:10.99.0.5
nothing_left
