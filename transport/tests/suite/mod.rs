//! The test suite for all providers.

pub(crate) mod cm;
pub(crate) mod datagrams;
pub(crate) mod extended;
pub(crate) mod integrity;
pub(crate) mod memory;
pub(crate) mod migration;
pub(crate) mod objects;
pub(crate) mod ops;
pub(crate) mod streams;
pub(crate) mod transfers;
pub(crate) mod unreliable;
pub(crate) mod world;

/// Passes the names of the suite's functions to a macro, after the given tokens.
#[macro_export]
macro_rules! suite_names {
    ($then:ident, $given:tt) => {
        $crate::$then! { $given
            objects: device_reports_attributes port_capabilities_are_set_and_cleared
                objects_in_use_are_busy limits_hold
                qp_transitions_through_states datagrams multicast;
            ops: sends_of_every_kind writes_and_reads atomics inline_unsignaled_and_fenced
                chain_posts_until_first_bad_request fast_registration_and_remote_invalidation
                sender_waits_for_receiver not_ready_for_too_long keys_rights_and_ranges
                bad_local_key_completes_with_error message_exceeding_receive_fails flushes_in_order
                srq_limit_raises_event cq_overrun_raises_event
                notifications_come_when_armed events_wait_for_further_completions
                completions_with_their_times send_queue_drains mixed_traffic many_connections
                long_messages empty_messages;
            cm: connection_exchanges_private_data rejection_contains_reason missing_listener_rejects_request
                disconnect_reaches_both_sides simultaneous_disconnect_completes
                destroying_identifier_closes_connection calls_out_of_turn_are_refused
                port_sharing_follows_owner_options wildcards_match_device_address
                unbound_listener_is_assigned_port options_are_set_in_time
                ack_timeout_is_proposed_to_peer connections_work_in_all_port_spaces
                bare_service_id_allows_full_private_data
                address_header_is_optional full_backlog_delays_requests
                destroying_listener_rejects_pending_requests connections_come_and_go
                owner_can_transition_qp_states
                qp_owner_can_reject_reply
                vendor_options_are_rejected_with_reason
                vendor_options_reach_peer
                timewait_only_follows_connection
                data_before_rtu_establishes
                local_qp_error_keeps_peer_connected;
            datagrams: sidr_resolves_queue_pair
                sidr_request_is_rejected sidr_without_service_is_rejected
                datagram_calls_out_of_turn_are_refused groups_are_joined_and_left;
            memory: regions_of_foreign_memory_at_other_addresses region_can_be_reregistered
                null_regions_and_prefetching prefetching_makes_pages_resident windows_of_type_1 windows_of_type_2
                invalid_bind_completes_with_error device_connects_to_itself;
            integrity: inserted_tuples_have_known_bytes
                tuples_are_inserted_stripped_and_passed
                failed_checks_report_kind_and_offset escapes_and_masks_limit_checks
                passed_tuples_are_remapped parts_of_wire_layout_are_accessible
                integrity_regions_are_invalidated_and_reused
                invalid_signature_attributes_are_refused;
            transfers: command_registers_transfers_and_invalidates
                region_returned_valid_is_replaced signature_contexts_transfer_and_check
                read_sink_is_inaccessible_after_read flushed_reads_release_sinks_once;
        }
    };
}

/// Same as [`suite_names`], for the part of the suite that requires services which shared memory
/// does not have, and that establishes connections without the connection manager: shared memory
/// identifies a peer by its link, which is created by the connection manager.
#[macro_export]
macro_rules! hand_made_names {
    ($then:ident, $given:tt) => {
        $crate::$then! { $given
            unreliable: uc_sends_and_writes uc_rejects_reads
                uc_connections_share_receives
                uc_messages_without_receive_are_lost
                uc_qp_transitions_through_states
                uc_connects_within_device
                uc_connects_through_cm;
            extended: xrc_messages_select_their_srq
                xrc_reads_writes_and_atomics xrc_requests_to_wrong_srq_fail
                xrc_connections_share_srq objects_of_xrc_domains
                xrc_connects_through_cm;
        }
    };
}

/// Same as [`suite_names`], for the part of the suite that requires devices with two addresses
/// each. These tests do nothing on other devices.
#[macro_export]
macro_rules! two_address_names {
    ($then:ident, $given:tt) => {
        $crate::$then! { $given
            migration: connection_migrates_by_command_and_packet
                connection_migrates_under_load armed_connection_is_rearmed_and_disarmed
                cm_loads_alternate_path;
        }
    };
}

/// Same as [`suite_names`], for iWARP devices, which only support reliable connections established
/// by the connection manager.
#[macro_export]
macro_rules! stream_names {
    ($then:ident, $given:tt) => {
        $crate::$then! { $given
            objects: device_reports_attributes port_capabilities_are_set_and_cleared
                objects_in_use_are_busy limits_hold;
            ops: sends_of_every_kind writes_and_reads atomics inline_unsignaled_and_fenced
                chain_posts_until_first_bad_request fast_registration_and_remote_invalidation
                keys_rights_and_ranges bad_local_key_completes_with_error message_exceeding_receive_fails
                flushes_in_order srq_limit_raises_event cq_overrun_raises_event
                notifications_come_when_armed events_wait_for_further_completions
                completions_with_their_times send_queue_drains mixed_traffic many_connections
                long_messages empty_messages;
            cm: connection_exchanges_private_data rejection_contains_reason missing_listener_rejects_request
                disconnect_reaches_both_sides simultaneous_disconnect_completes
                destroying_identifier_closes_connection calls_out_of_turn_are_refused
                port_sharing_follows_owner_options wildcards_match_device_address
                unbound_listener_is_assigned_port options_are_set_in_time
                full_backlog_delays_requests
                destroying_listener_rejects_pending_requests connections_come_and_go
                timewait_only_follows_connection data_before_rtu_establishes;
            memory: regions_of_foreign_memory_at_other_addresses region_can_be_reregistered
                null_regions_and_prefetching prefetching_makes_pages_resident windows_of_type_1 windows_of_type_2
                invalid_bind_completes_with_error;
            integrity: inserted_tuples_have_known_bytes
                tuples_are_inserted_stripped_and_passed
                failed_checks_report_kind_and_offset escapes_and_masks_limit_checks
                passed_tuples_are_remapped parts_of_wire_layout_are_accessible
                integrity_regions_are_invalidated_and_reused
                invalid_signature_attributes_are_refused;
            transfers: command_registers_transfers_and_invalidates
                region_returned_valid_is_replaced signature_contexts_transfer_and_check
                read_sink_is_inaccessible_after_read flushed_reads_release_sinks_once;
            streams: unsupported_iwarp_calls_are_rejected send_without_receive_closes_connection
                write_with_wrong_key_closes_connection
                local_qp_error_closes_peer_connection
                local_qp_reset_closes_peer_connection;
        }
    };
}

/// Same as [`provider_suite`], for iWARP devices.
#[macro_export]
macro_rules! stream_suite {
    ($world:expr) => {
        $crate::stream_names! { suite_tests, ($world) }
    };
}

/// Generates a test for each function of the suite, using an expression that creates the world.
#[macro_export]
macro_rules! provider_suite {
    ($world:expr) => {
        $crate::suite_names! { suite_tests, ($world) }
    };
}

/// Same as [`provider_suite`], for connections without the connection manager.
#[macro_export]
macro_rules! hand_made_suite {
    ($world:expr) => {
        $crate::hand_made_names! { suite_tests, ($world) }
    };
}

/// Expands the names for `provider_suite`.
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
