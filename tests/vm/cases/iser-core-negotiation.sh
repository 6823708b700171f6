#: group: iser
#: about: riserd on rdma_core: verified I/O with all combinations of InitialR2T, ImmediateData and MaxBurstLength
#: limit: 600
TRANSPORT=iser CORE=yes
. /vm/iscsi.sh
every_negotiation
