#: group: srp
#: about: riserd on rdma_core: the link down and up while writes run, for shorter and for longer than the kernel retries
#: limit: 400
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-link.sh"
