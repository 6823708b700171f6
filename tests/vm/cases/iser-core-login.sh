#: group: iser
#: about: riserd on rdma_core: open-iscsi finds the target, logs in, verifies, logs out
#: limit: 240
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
discover_and_login
