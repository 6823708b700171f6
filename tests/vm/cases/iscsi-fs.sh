#: group: iscsi
#: about: a file system over iscsi_tcp: made, filled, checked, compared
#: limit: 400
TRANSPORT=tcp
. /vm/iscsi.sh
file_system
