#: group: transport
#: about: RDMA device is removed during transfers and added again
#: limit: 400
two_hosts
trap one_host EXIT
export RISER_CUT="rdma link delete rxe0" RISER_HEAL="rdma link add rxe0 type rxe netdev v0; sleep 1"
on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer stress::device_is_unplugged stress::events_reach_their_owner
nothing_left
