#: group: srp
#: about: riserd on rdma_core: with and without immediate data, registration always and never
#: limit: 600
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-parameters.sh"
