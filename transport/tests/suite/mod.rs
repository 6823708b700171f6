//! The suite that every provider passes.

pub(crate) mod cm;
pub(crate) mod datagrams;
pub(crate) mod extended;
pub(crate) mod memory;
pub(crate) mod migration;
pub(crate) mod objects;
pub(crate) mod ops;
pub(crate) mod streams;
pub(crate) mod transfers;
pub(crate) mod unreliable;
pub(crate) mod world;

/// Hands the names of the suite's functions to a macro, after what is given for it.
#[macro_export]
macro_rules! suite_names {
    ($then:ident, $given:tt) => {
        $crate::$then! { $given
            objects: a_device_reports_what_it_is what_is_in_use_is_busy limits_hold
                a_queue_pair_goes_through_its_states datagrams multicast;
            ops: sends_of_every_kind writes_and_reads atomics inline_unsignaled_and_fenced
                a_chain_posts_up_to_the_first_bad_request fast_registration_and_remote_invalidation
                a_sender_waits_for_the_receiver not_ready_for_too_long keys_rights_and_ranges
                a_bad_local_key_completes a_message_longer_than_its_receive flushes_in_order
                a_shared_receive_queue_and_its_limit an_overrun_queue_is_an_event
                notifications_come_when_armed events_wait_for_further_completions
                completions_with_their_times the_send_queue_drains mixed_traffic many_connections
                long_messages empty_messages;
            cm: both_sides_hear_what_the_other_says a_refusal_brings_its_reason no_peer_listens
                a_disconnect_reaches_both_sides both_disconnect_at_once
                destroying_an_identifier_ends_its_connection calls_out_of_turn_are_refused
                ports_are_shared_as_their_owners_say wildcards_stand_for_the_address
                a_listener_without_an_address_gets_a_port options_are_set_in_time
                an_ack_timeout_is_proposed_to_the_peer every_port_space_connects
                a_bare_service_id_takes_all_the_private_data
                a_request_may_go_without_its_address_header a_full_backlog_makes_requests_wait
                destroying_a_listener_refuses_what_waits connections_come_and_go
                an_owner_takes_its_queue_pairs_through_their_states_itself
                an_answer_is_refused_by_the_owner_of_the_queue_pair
                vendor_options_are_refused_with_their_reason
                vendor_options_reach_the_other_side
                only_a_connection_has_a_timewait
                data_before_the_confirmation_establishes
                an_error_here_does_not_end_the_connection_there;
            datagrams: a_datagram_identifier_finds_the_queue_pair_behind_a_port
                a_datagram_identifier_is_refused no_datagram_service_is_behind_a_port
                datagram_calls_out_of_turn_are_refused groups_are_joined_and_left;
            memory: regions_of_foreign_memory_at_other_addresses a_region_is_registered_anew
                null_regions_and_prefetching windows_of_type_1 windows_of_type_2
                a_bind_against_the_rules_completes a_device_talks_to_itself;
            transfers: a_command_registers_transfers_and_invalidates
                a_region_put_back_alive_is_replaced;
        }
    };
}

/// As [`suite_names`], for the part of the suite that is about services that there are not in shared
/// memory, and makes connections without the connection manager: there a peer is known by the link to
/// it, which the manager makes.
#[macro_export]
macro_rules! hand_made_names {
    ($then:ident, $given:tt) => {
        $crate::$then! { $given
            unreliable: unreliable_sends_and_writes an_unreliable_connection_reads_nothing
                unreliable_connections_share_receives
                unreliable_messages_without_a_receive_are_lost
                an_unreliable_queue_pair_goes_through_its_states
                an_unreliable_connection_within_a_device
                an_unreliable_connection_is_made_by_the_connection_manager;
            extended: extended_messages_go_to_the_queue_that_they_name
                extended_reads_writes_and_atomics extended_requests_for_a_wrong_queue
                extended_connections_share_a_queue objects_of_xrc_domains
                an_extended_connection_is_made_by_the_connection_manager;
        }
    };
}

/// As [`suite_names`], for the part of the suite that needs devices with two addresses each. On others
/// there is nothing to do.
#[macro_export]
macro_rules! two_address_names {
    ($then:ident, $given:tt) => {
        $crate::$then! { $given
            migration: a_connection_migrates_by_command_and_by_packet
                a_connection_migrates_under_load an_armed_connection_is_rearmed_and_disarmed
                the_connection_manager_loads_a_path;
        }
    };
}

/// As [`suite_names`], for devices for iWARP: reliable connections that the connection manager makes.
#[macro_export]
macro_rules! stream_names {
    ($then:ident, $given:tt) => {
        $crate::$then! { $given
            objects: a_device_reports_what_it_is what_is_in_use_is_busy limits_hold;
            ops: sends_of_every_kind writes_and_reads atomics inline_unsignaled_and_fenced
                a_chain_posts_up_to_the_first_bad_request fast_registration_and_remote_invalidation
                keys_rights_and_ranges a_bad_local_key_completes a_message_longer_than_its_receive
                flushes_in_order a_shared_receive_queue_and_its_limit an_overrun_queue_is_an_event
                notifications_come_when_armed events_wait_for_further_completions
                completions_with_their_times the_send_queue_drains mixed_traffic many_connections
                long_messages empty_messages;
            cm: both_sides_hear_what_the_other_says a_refusal_brings_its_reason no_peer_listens
                a_disconnect_reaches_both_sides both_disconnect_at_once
                destroying_an_identifier_ends_its_connection calls_out_of_turn_are_refused
                ports_are_shared_as_their_owners_say wildcards_stand_for_the_address
                a_listener_without_an_address_gets_a_port options_are_set_in_time
                a_full_backlog_makes_requests_wait
                destroying_a_listener_refuses_what_waits connections_come_and_go
                only_a_connection_has_a_timewait data_before_the_confirmation_establishes;
            memory: regions_of_foreign_memory_at_other_addresses a_region_is_registered_anew
                null_regions_and_prefetching windows_of_type_1 windows_of_type_2
                a_bind_against_the_rules_completes;
            transfers: a_command_registers_transfers_and_invalidates
                a_region_put_back_alive_is_replaced;
            streams: what_iwarp_does_not_have_is_refused a_send_without_a_receive_ends_the_connection
                what_is_written_with_a_wrong_key_ends_the_connection
                an_error_here_ends_the_connection_there
                a_reset_here_ends_the_connection_there;
        }
    };
}

/// As [`provider_suite`], for devices for iWARP.
#[macro_export]
macro_rules! stream_suite {
    ($world:expr) => {
        $crate::stream_names! { suite_tests, ($world) }
    };
}

/// Makes a test of every function of the suite, for the world that an expression makes.
#[macro_export]
macro_rules! provider_suite {
    ($world:expr) => {
        $crate::suite_names! { suite_tests, ($world) }
    };
}

/// As [`provider_suite`], for connections without the connection manager.
#[macro_export]
macro_rules! hand_made_suite {
    ($world:expr) => {
        $crate::hand_made_names! { suite_tests, ($world) }
    };
}

/// Expansion of the names by `provider_suite`.
#[macro_export]
macro_rules! suite_tests {
    (($world:expr) $($module:ident: $($name:ident)*;)*) => {
        $($(
            #[test]
            fn $name() {
                $crate::suite::$module::$name($world);
            }
        )*)*
    };
}
