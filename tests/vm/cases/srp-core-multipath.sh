#: group: srp
#: about: riserd on rdma_core: dm-multipath over two portals, one of them cut and mended while writes run
#: limit: 500
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-multipath.sh"
