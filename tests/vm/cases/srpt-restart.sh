#: group: srpt
#: about: ib_srpt is disabled and enabled, its link is disconnected, and its device is removed, under verified load
#: limit: 420
two_hosts
trap kernel_target_clean EXIT
kernel_target
commands() {
    cat "$SRPT"/lun/lun_0/statistics/scsi_tgt_port/in_cmds
}
commands_since() {
    [ "$(commands)" -gt "$1" ]
}
# Verified writes in the background for 20 seconds, which must not fail.
load() {
    local before
    before=$(commands)
    riser_on "$1" bench --overwrite "$(lun 0)&channels=2" --rw randwrite --bs 16K --depth 8 --size 32M --runtime 20s \
        --warm-up 0 --verify --timeout 90s &
    LOAD=$!
    # The port rejects a login while it is disabled, so wait until the load has logged in.
    wait_for 30 commands_since $((before + 20))
}
under_load() {
    kill -0 $LOAD || fail "the load completed too early"
    "$@"
}
service_off() {
    echo 0 >"$SRPT/enable"
}
for provider in roce rdma_core; do
    echo "--- $provider: service disabled and enabled"
    load $provider
    for round in 1 2; do
        under_load service_off
        sleep 1
        echo 1 >"$SRPT/enable"
        sleep 2
    done
    wait $LOAD
done
echo "--- roce: link down and up"
load roce
under_load far_link down
sleep 4
far_link up
wait $LOAD
echo "--- roce: the target's device is removed and added"
load roce
under_load rdma link delete rxe0
sleep 1
rdma link add rxe0 type rxe netdev v0
wait_for 20 gid_is_there rxe0 10.99.0.1
kernel_port_again
wait $LOAD
