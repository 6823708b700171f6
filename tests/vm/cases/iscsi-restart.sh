#: group: iscsi
#: about: riserd ended, and killed, while iscsi_tcp writes
#: limit: 400
TRANSPORT=tcp
. /vm/iscsi.sh
target_restarts
