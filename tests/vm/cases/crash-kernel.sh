#: group: crash
#: about: riserd is killed at random times while iscsi_tcp and ib_srp read and write the same unit
#: limit: 600
#: rounds: 12
TRANSPORT=tcp
. /vm/iscsi.sh
# Only capture RDMA packets, because a TCP stream is cut anywhere when the daemon is killed.
CAPTURED=
. /vm/crash.sh
crash_rig
killed_under_load
srp_logout
iscsi_logout
stop_serving
