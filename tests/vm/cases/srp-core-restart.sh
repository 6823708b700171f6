#: group: srp
#: about: riserd on rdma_core: stopped and started again during writes
#: limit: 400
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-restart.sh"
