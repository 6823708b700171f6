#: group: srpt
#: about: riser discovers and inspects ib_srpt disks with both providers, and reports rejected logins
#: limit: 480
two_hosts
trap kernel_target_clean EXIT
kernel_target
for provider in roce rdma_core; do
    said=$(riser_on $provider discover "$(lun 0)")
    echo "$said"
    [[ $said == *"96.00 MiB  LIO-ORG FILEIO"* ]] || fail "the file disk is missing"
    [[ $said == *"64.00 MiB  LIO-ORG RAMDISK"* ]] || fail "the RAM disk is missing"
    said=$(riser_on $provider inquiry "$(lun 0)")
    echo "$said"
    [[ $said == *RIG-F0* ]] || fail "unexpected serial number"
    dd if=/dev/urandom of=/tmp/in bs=1M count=3 status=none
    for lun in 0 1; do
        riser_on $provider write --overwrite "$(lun $lun)&channels=4" /tmp/in --offset 5000
        riser_on $provider read "$(lun $lun)&immediate=0" --offset 5000 --length 3M >/tmp/out
        cmp /tmp/in /tmp/out
    done
    # The session is closed while its other channels are still being connected. No channel must be
    # left, because the kernel would wait for all of them when the initiator's access is removed.
    for round in {1..10}; do
        riser_on $provider read "$(lun 0)&channels=8" --length 512 >/dev/null
    done
    # The target string in the format used for the kernel's ib_srp.
    riser_on $provider read "id_ext=$G,ioc_guid=$G,dest=10.99.0.1:5555,cmd_sg_entries=32" --length 512 >/dev/null
    refused $provider 5 "no such logical unit" read "$(lun 9)"
    refused $provider 3 'log in' read "srp://10.99.0.1/0?id_ext=1&ioc_guid=2"
    refused $provider 3 'log in' read "srp://10.99.0.1:5556/0?id_ext=$G&ioc_guid=$G"
    SECONDS=0
    refused $provider 4 'log in' --timeout 3s read "srp://10.99.0.77/0?id_ext=$G&ioc_guid=$G"
    # Without this option it would take 30 s, and the guest is slow.
    [ $SECONDS -le 20 ] || fail "the timeout of an unreachable address took $SECONDS s"
    keep_out
    refused $provider 3 'log in' read "$(lun 0)"
    let_in
done
refused rdma_core 2 'id_ext and ioc_guid' read $PLAIN/0
riser_on roce discover $PLAIN
