#: group: iser
#: about: file system over ib_iser: mkfs, copy, fsck, compare
#: limit: 400
TRANSPORT=iser
. /vm/iscsi.sh
file_system
