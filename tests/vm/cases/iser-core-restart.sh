#: group: iser
#: about: riserd on rdma_core: stopped and killed during writes; no data is lost
#: limit: 300
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
target_restarts
