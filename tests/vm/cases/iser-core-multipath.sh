#: group: iser
#: about: riserd on rdma_core: dm-multipath over two portals, one of them disconnected and reconnected
#: limit: 400
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
two_paths_one_cut
