#: group: transport
#: about: the provider suite, rdma_core connecting to roce
#: limit: 600
two_hosts
trap one_host EXIT
on_devices rdma_core:10.99.0.1 roce:10.99.0.2@peer
nothing_left
