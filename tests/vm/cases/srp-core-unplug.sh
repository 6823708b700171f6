#: group: srp
#: about: riserd on rdma_core while its RDMA device is taken away and comes back
#: limit: 300
core_rig
for round in 1 2; do
    srp_login ch_count=2
    fio --name=load --filename="$DISK" --size=32m --rw=randwrite --bs=16k --direct=1 \
        --ioengine=libaio --iodepth=8 --time_based --runtime=4 --output="$KEEP/fio-$round.txt" &
    sleep 1
    rdma link delete rxe0
    wait %fio 2>/dev/null || wait $! || true
    gone() { [ "$(grep -c 'the RDMA device is gone' "$KEEP/riserd.log")" = $round ]; }
    wait_for 30 gone
    wait_for 60 no_hosts
    kill -0 "$RISERD" || fail "riserd has ended"
    rdma link add rxe0 type rxe netdev d0
    wait_for 20 gid_is_there
    back() { [ "$(grep -c 'the RDMA device is back' "$KEEP/riserd.log")" = $round ]; }
    wait_for 30 back
    wait_for 20 test -e /sys/class/infiniband_srp/srp-rxe0-1/add_target
done
srp_login ch_count=1
verify "$DISK" 2m --bs=16k
srp_logout
stop_serving
