#: group: iser
#: about: riserd on rdma_core: the link is cut and mended while ib_iser writes; NOPs notice
#: limit: 400
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
link_is_cut
