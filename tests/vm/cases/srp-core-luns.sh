#: group: srp
#: about: riserd on rdma_core: logical units added and removed by SIGHUP while writes run on another one
#: limit: 300
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-luns.sh"
