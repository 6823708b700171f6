#: group: srp
#: about: riserd on rdma_core: immediate data on and off, registration always and never
#: limit: 600
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-parameters.sh"
