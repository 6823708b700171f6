#: group: rig
#: about: the rig itself: rdma_rxe comes up between two network namespaces
#: limit: 120
#: short: yes
two_hosts
trap one_host EXIT
ibv_devinfo -d rxe0 | grep -q PORT_ACTIVE
on_peer bash -c "echo hello >/dev/udp/10.99.0.1/9"
