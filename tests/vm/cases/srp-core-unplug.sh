#: group: srp
#: about: riserd on rdma_core: its RDMA device is removed under load and added again, twice
#: limit: 300
#: packets: none
dummy_host
trap dummy_clean EXIT
# Two portals, so that two devices of riserd use the device that is removed.
serve <<Y
backends:
  disk0: { kind: file, path: $IMAGES/disk0.img, size: 64MiB, create: true, serial: RIG-0 }
targets:
  - name: rig
    portals:
      - { protocol: srp, listen: 10.99.0.2, ioc_guid: 0x$GUID }
      - { protocol: srp, listen: 10.99.0.1, ioc_guid: 0x$GUID }
    luns: { 0: disk0 }
    access: open
limits: { max_transfer: 8MiB, buffer_pool_mib: 64 }
transport: { provider: rdma_core }
Y
load_srp
said() {
    [ "$(grep -c "$1" "$KEEP/riserd.log")" = "$2" ]
}
for round in 1 2; do
    srp_login ch_count=2
    fio --name=load --filename="$DISK" --size=32m --rw=randwrite --bs=16k --direct=1 \
        --ioengine=libaio --iodepth=8 --time_based --runtime=6 --allow_file_create=0 \
        --output="$KEEP/fio-$round.txt" &
    load=$!
    sleep 1
    timeout 60 rdma link delete rxe0 || fail "the kernel waits for riserd"
    # Errors are expected.
    wait $load || true
    wait_for 10 said 'RDMA device was removed' $((2 * round))
    wait_for 60 no_hosts
    kill -0 "$RISERD" || fail "riserd has exited"
    sleep 2
    rdma link add rxe0 type rxe netdev d0
    wait_for 20 gid_is_there rxe0 10.99.0.1
    wait_for 30 said 'RDMA device is available again' $((2 * round))
    wait_for 20 test -e /sys/class/infiniband_srp/srp-rxe0-1/add_target
done
for dest in 10.99.0.2 10.99.0.1; do
    wait_for 30 srp_add $dest:5555 "$GUID" ch_count=1
    wait_for 60 find_disk 0
    verify "$DISK" 2m --bs=16k
    srp_logout
done
stop_serving
