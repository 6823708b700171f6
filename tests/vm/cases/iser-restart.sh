#: group: iser
#: about: riserd ended, and killed, while ib_iser writes
#: limit: 400
TRANSPORT=iser
. /vm/iscsi.sh
target_restarts
