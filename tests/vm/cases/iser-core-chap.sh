#: group: iser
#: about: riserd on rdma_core: one-way and mutual CHAP with all algorithms, and wrong secrets
#: limit: 240
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
chap_both_ways
