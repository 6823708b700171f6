#: group: iser
#: about: a file system over ib_iser: made, filled, checked, compared
#: limit: 400
TRANSPORT=iser
. /vm/iscsi.sh
file_system
