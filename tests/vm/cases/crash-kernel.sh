#: group: crash
#: about: riserd killed at random moments while iscsi_tcp and ib_srp write and read one unit
#: limit: 600
#: rounds: 12
TRANSPORT=tcp
. /vm/iscsi.sh
# Of the RDMA packets alone: a kill cuts the stream of TCP anywhere.
CAPTURED=
. /vm/crash.sh
crash_rig
killed_under_load
srp_logout
iscsi_logout
stop_serving
