#: group: transport
#: about: all operations with 1 % and 10 % packet loss on both ends
#: limit: 2400
#: short: no
two_hosts
trap one_host EXIT
modprobe sch_netem
for loss in 1 10; do
    for tc in "tc" "tc -n peer"; do
        dev=v0
        [ "$tc" = tc ] || dev=v1
        # Uses small segments, so that netem drops packets instead of entire trains.
        $tc qdisc replace dev $dev root netem loss $loss% limit 20000
    done
    RISER_LENGTH=$((1 << 20)) on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer stress::sizes stress::late
    on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer mixed_traffic connections_come
    on_devices roce:10.99.0.2@peer rdma_core:10.99.0.1 mixed_traffic connections_come
done
nothing_left
