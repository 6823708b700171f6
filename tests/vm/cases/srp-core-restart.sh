#: group: srp
#: about: riserd on rdma_core: ended and started again in good order while writes run
#: limit: 400
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-restart.sh"
