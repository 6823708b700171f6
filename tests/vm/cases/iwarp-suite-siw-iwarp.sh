#: group: iwarp
#: about: connections and operations of the provider suite, siw connecting to iwarp
#: limit: 500
iwarp_hosts
trap one_host EXIT
on_devices rdma_core:10.99.0.1 iwarp:10.99.0.2@peer \
    sends_of_every writes_and_reads both_sides_hear a_refusal_brings no_peer_listens disconnect_reaches connections_come
