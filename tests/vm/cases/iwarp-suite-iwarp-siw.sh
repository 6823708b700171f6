#: group: iwarp
#: about: the provider suite, iwarp connecting to siw
#: limit: 900
iwarp_hosts
trap one_host EXIT
# Excludes tests where siw or its library behaves differently: SEND with invalidate by programs,
# posting to shared queues, the order of completions, and separate events.
on_devices iwarp:10.99.0.2@peer rdma_core:10.99.0.1 \
    reports_what_it_is what_is_in_use limits_hold sends_of_every writes_and_reads inline_unsignaled \
    bad_local_key longer_than_its_receive flushes_in_order overrun_queue both_sides_hear a_refusal_brings \
    no_peer_listens disconnect_reaches both_disconnect destroying_an_identifier calls_out_of_turn ports_are_shared \
    wildcards_stand without_an_address options_are_set full_backlog destroying_a_listener connections_come \
    mixed_traffic
