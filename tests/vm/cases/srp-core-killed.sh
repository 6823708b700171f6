#: group: srp
#: about: riserd on rdma_core: killed and restarted while writes run; nothing is lost
#: limit: 400
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-killed.sh"
