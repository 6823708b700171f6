#: group: srp
#: about: riserd on rdma_core: killed and restarted during writes; no data is lost
#: limit: 400
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-killed.sh"
