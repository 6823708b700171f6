#: group: iscsi
#: about: riserd is stopped and killed during iscsi_tcp writes
#: limit: 400
TRANSPORT=tcp
. /vm/iscsi.sh
target_restarts
