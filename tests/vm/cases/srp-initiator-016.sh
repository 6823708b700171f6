#: group: srp
#: about: RDMA device is removed while the initiator is logged in
#: limit: 180
PARAMS=ch_count=4
three_disks_rig
multipath_end
rdma link delete rxe0
no_hosts_left() { ! ls -d /sys/class/srp_remote_ports/* >/dev/null 2>&1; }
wait_for 60 no_hosts_left
# The target has lost the connections without a notification, and must serve a new initiator.
rdma link add rxe0 type rxe netdev v0
wait_for 20 gid_is_there rxe0 10.99.0.1
wait_for 20 test -e /sys/class/infiniband_srp/srp-rxe0-1/add_target
srp_login ch_count=1
dd if="$DISK" of=/dev/null bs=64k count=4 iflag=direct status=none
