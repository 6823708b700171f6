#: group: srp
#: about: riserd on rdma_core: verified I/O from 512 B to 4 MiB
#: limit: 400
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-io.sh"
