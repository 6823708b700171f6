#: group: transport
#: about: the provider suite over IPv6, in both directions
#: limit: 900
#: short: no
two_hosts
trap one_host EXIT
on_devices rdma_core:fd99::1 roce:fd99::2@peer
on_devices roce:fd99::2@peer rdma_core:fd99::1
nothing_left
