#: group: rig
#: about: the rig: rdma_rxe works, and RDMA packets are forwarded between two network namespaces
#: limit: 120
#: short: yes
#: packets: 2
two_hosts
trap one_host EXIT
ibv_devinfo -d rxe0 | grep -q PORT_ACTIVE || fail "the port is not active"
passed() { cat "/sys/class/infiniband/rxe0/ports/1/hw_counters/$1_pkts"; }
received=$(passed rcvd) sent=$(passed sent)
# The kernel's CM must receive the request from our NIC, and reject a service that doesn't exist.
refused roce 3 'log in' read "srp://10.99.0.1:5556/0?id_ext=1&ioc_guid=2"
[ "$(passed rcvd)" -gt "$received" ] || fail "rdma_rxe received no packets"
[ "$(passed sent)" -gt "$sent" ] || fail "rdma_rxe sent no packets"
