#: group: srp
#: about: riserd on rdma_core: a file system made, filled, checked, and read after a restart of the daemon
#: limit: 300
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-fs.sh"
