#: group: iser
#: about: riserd on rdma_core: CHAP one way and both, with every algorithm, and wrong secrets
#: limit: 240
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
chap_both_ways
