#: group: iser
#: about: riserd on rdma_core: mkfs, copy, log out and in, fsck, checksums
#: limit: 400
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
file_system
