#: group: iser
#: about: riserd is stopped and killed during ib_iser writes
#: limit: 400
TRANSPORT=iser
. /vm/iscsi.sh
target_restarts
