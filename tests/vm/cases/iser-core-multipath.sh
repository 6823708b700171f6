#: group: iser
#: about: riserd on rdma_core: dm-multipath over two portals, one of them cut and mended
#: limit: 400
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
two_paths_one_cut
