#: group: iser
#: about: riserd on rdma_core: it ends in good order and is killed while writes run; nothing is lost
#: limit: 300
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
target_restarts
