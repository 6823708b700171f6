#: group: iwarp
#: about: connections and operations of the provider suite, siw connecting to iwarp
#: limit: 500
iwarp_hosts
trap one_host EXIT
on_devices rdma_core:10.99.0.1 iwarp:10.99.0.2@peer \
    sends_of_every writes_and_reads exchanges_private_data rejection_contains_reason \
    missing_listener_rejects_request disconnect_reaches connections_come
