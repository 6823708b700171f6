#: group: srp
#: about: dm-multipath over two portals, one of them disconnected and reconnected during writes
#: limit: 500
two_hosts
trap srp_clean EXIT
on_peer ip addr add 10.99.0.3/24 dev v1
serve <<Y
backends:
  disk0: { kind: file, path: $IMAGES/disk0.img, size: 64MiB, create: true, serial: RIG-0 }
targets:
  - name: rig
    portals:
      - { protocol: srp, listen: 10.99.0.2, ioc_guid: 0x$GUID }
      - { protocol: srp, listen: 10.99.0.3, ioc_guid: 0x0200c0ffee000002 }
    luns: { 0: disk0 }
    access: open
Y
# The kernel doesn't fail a path while it tries to reconnect, so the failure must happen first.
load_srp fast_io_fail_tmo=2 reconnect_delay=6 dev_loss_tmo=300
srp_login ch_count=1 tl_retry_count=2
srp_add 10.99.0.3:5555 0200c0ffee000002 ch_count=1 tl_retry_count=2
two_paths() { [ "$(multipath_table rq | grep -o 'service-time 0 2')" ]; }
wait_for 30 two_paths
multipath_over bio
# If a command was acknowledged at the transport level before the link was cut, this is only
# detected after its timeout. If the guest is slow, this may require all steps of error recovery.
for d in /sys/class/scsi_device/*:0/device/timeout; do echo 5 >"$d"; done
load /dev/mapper/paths 20
sleep 3
on_peer ip addr del 10.99.0.3/24 dev v1
one_path() { dmsetup status paths | grep -q ' F '; }
wait_for 180 one_path
sleep 2
on_peer ip addr add 10.99.0.3/24 dev v1
wait_for 120 srp_connected
for d in /sys/class/scsi_device/*:0/device; do
    # The last step of error recovery sets the disk offline.
    echo running >"$d/state"
    dmsetup message paths 0 reinstate_path "$(cat "$d"/block/*/dev)"
done
dmsetup status paths
loaded
multipath_end
srp_logout
stop_serving
