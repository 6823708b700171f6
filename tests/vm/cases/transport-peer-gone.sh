#: group: transport
#: about: a network that goes in the middle of transfers and comes back
#: limit: 600
#: short: no
two_hosts
trap one_host EXIT
export RISER_CUT="ip link set v0 down" RISER_HEAL="ip link set v0 up; sleep 1"
on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer stress::the_peer_vanishes
on_devices roce:10.99.0.2@peer rdma_core:10.99.0.1 stress::the_peer_vanishes
nothing_left
