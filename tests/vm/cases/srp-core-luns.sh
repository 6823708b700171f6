#: group: srp
#: about: riserd on rdma_core: logical units are added and removed with SIGHUP during writes to another unit
#: limit: 300
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-luns.sh"
