#: group: transport
#: about: the provider suite, roce connecting to rdma_core
#: limit: 600
two_hosts
trap one_host EXIT
on_devices roce:10.99.0.2@peer rdma_core:10.99.0.1
nothing_left
