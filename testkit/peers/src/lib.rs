//! Minimal initiators, for tests of targets: one connection each, no recovery, and nothing that is
//! done for the user.
//!
//! - [`mini`]: SRP on any provider.
//! - [`iser_client`]: iSER on any provider.
//! - [`tcp`]: iSCSI on a TCP socket.
//! - [`gsi`]: queue pair 1 of an initiator, which asks an I/O unit for its attributes.
//!
//! [`pdus`] makes CDBs and requests of iSCSI as most tests want them.
//!
//! They use the wire formats of `riser-scsi`, and of the initiator nothing. What waits counts its
//! attempts, or has a deadline, and fails when it has used them up.

#![allow(
    missing_docs,
    reason = "for tests, which use what the names of functions say"
)]

mod dial;
pub mod gsi;
pub mod iser_client;
pub mod mini;
pub mod pdus;
pub mod tcp;

pub use dial::Pump;
