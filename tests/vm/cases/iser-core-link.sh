#: group: iser
#: about: riserd on rdma_core: link is disconnected and reconnected during ib_iser writes, detected by NOPs
#: limit: 400
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
link_is_cut
