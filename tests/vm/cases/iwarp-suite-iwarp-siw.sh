#: group: iwarp
#: about: the provider suite, iwarp connecting to siw
#: limit: 900
iwarp_hosts
trap one_host EXIT
# Excludes tests where siw or its library behaves differently: SEND with invalidate by programs,
# posting to shared queues, the order of completions, and separate events.
on_devices iwarp:10.99.0.2@peer rdma_core:10.99.0.1 \
    device_reports_attributes objects_in_use limits_hold sends_of_every writes_and_reads inline_unsignaled \
    bad_local_key exceeding_receive flushes_in_order cq_overrun exchanges_private_data \
    rejection_contains_reason missing_listener_rejects_request disconnect_reaches simultaneous_disconnect \
    destroying_identifier calls_out_of_turn port_sharing wildcards_match unbound_listener options_are_set \
    full_backlog destroying_listener connections_come mixed_traffic
