#: group: transport
#: about: peers that vanish in the middle of transfers, and whole devices
#: limit: 600
#: short: no
two_hosts
trap one_host EXIT
export RISER_CUT="ip link set v0 down" RISER_HEAL="ip link set v0 up; sleep 1"
on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer stress::the_peer
on_devices roce:10.99.0.2@peer rdma_core:10.99.0.1 stress::the_peer
nothing_left
export RISER_CUT="rdma link delete rxe0" RISER_HEAL="rdma link add rxe0 type rxe netdev v0"
on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer stress::the_device
nothing_left
