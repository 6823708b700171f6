#: group: srp
#: about: riserd on rdma_core: mkfs, copy and fsck, and reading after a restart of the daemon
#: limit: 300
CORE=yes
. "$RISER_ROOT/tests/vm/cases/srp-fs.sh"
