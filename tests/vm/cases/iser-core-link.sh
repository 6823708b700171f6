#: group: iser
#: about: riserd on rdma_core: ib_iser's link is cut and mended while it writes; NOPs notice
#: limit: 400
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
link_is_cut
