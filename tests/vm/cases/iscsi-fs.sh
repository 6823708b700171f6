#: group: iscsi
#: about: file system over iscsi_tcp: mkfs, copy, fsck, compare
#: limit: 400
TRANSPORT=tcp
. /vm/iscsi.sh
file_system
