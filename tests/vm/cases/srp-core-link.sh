#: group: srp
#: about: riserd on rdma_core: link down during writes, for less and for more time than the kernel's retries
#: limit: 400
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-link.sh"
