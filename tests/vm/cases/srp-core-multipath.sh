#: group: srp
#: about: riserd on rdma_core: dm-multipath over two portals, one of them disconnected and reconnected during writes
#: limit: 500
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-multipath.sh"
