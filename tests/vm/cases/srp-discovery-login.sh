#: group: srp-discovery
#: about: ib_srp logs in to the targets that srp_daemon found by the IB CM, verified I/O, renewal after a restart
#: limit: 600
. "$RISER_ROOT/tests/vm/sa.sh"
. "$RISER_ROOT/tests/vm/discovery.sh"
ib_hosts
trap not_discoverable EXIT
administrator
start_sa --source fd99::1
discoverable

modprobe -a sd_mod sg ib_srp
add=/sys/class/infiniband_srp/srp-ibrxe0-1/add_target
wait_for 20 test -e $add

# Returns whether there are this many disks of riserd.
disks() {
    [ "$(cat /sys/class/scsi_device/*/device/vendor 2>/dev/null | grep -c RISER)" = "$1" ]
}

# The login with a service ID, as it is written by srp_daemon.
login_of $FIRST >$add
wait_for 60 disks 1
wait_for 60 find_disk 0
host=/sys/class/scsi_host/host$(basename "$(readlink -f "/sys/block/${DISK#/dev/}/device")" | cut -d: -f1)
[ "$(cat "$host/service_id")" = "0x$FIRST" ] || fail "the service ID is $(cat "$host/service_id")"
[ "$(cat "$host/dgid")" = fd99:0000:0000:0000:0000:0000:0000:0003 ] || fail "the GID is $(cat "$host/dgid")"
[ "$(cat "$host/local_ib_device")" = ibrxe0 ] || fail "another device"
sg_vpd -p 0x80 "$DISK" | grep -q RIG-1 || fail "unexpected serial number"
verify "$DISK" 2m --bs=4k --iodepth=16
verify "$DISK" 8m --bsrange=512-256k --iodepth=8

# srp_daemon logs in to the second target, and does not repeat the login to the first.
timeout 200 srp_daemon -o -e -c -f /dev/null -i ibrxe0 -p 1 | tee /tmp/logins
[ "$(cat /tmp/logins)" = "$(login_of $SECOND)" ] || fail "srp_daemon did not log in to the second target only"
wait_for 60 disks 2
for d in /sys/class/scsi_device/*:0/device/block/*; do
    verify "/dev/$(basename "$d")" 4m --bs=64k --iodepth=8
done
srp_logout

# The path is found with netlink, and only subnet administration and device management use MADs.
[ "$(kernel_queries)" -ge 2 ] || fail "$(kernel_queries) kernel queries"
stop_serving
