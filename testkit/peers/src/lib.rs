//! Minimal initiators used to test targets. Each has a single connection, doesn't support recovery,
//! and leaves everything else to the test.
//!
//! - [`mini`]: SRP using any provider.
//! - [`iser_client`]: iSER using any provider.
//! - [`tcp`]: iSCSI using a TCP socket.
//! - [`gsi`]: queue pair 1 of an initiator, used to query the attributes of an I/O unit.
//!
//! [`pdus`] creates CDBs and iSCSI requests with the values needed by most tests.
//!
//! We only use the wire formats in `riser-scsi` and no code from the real initiator. Any code that
//! waits must have a limit on attempts or a deadline, and will fail if this is exceeded.

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

/// Creates a configuration with a target that any initiator can use. Portals have a protocol and an
/// address.
pub fn open_target(
    iqn: &str,
    portals: &[(&str, String)],
    backends: &str,
    luns: &str,
    rest: &str,
) -> String {
    let portal =
        |(protocol, at): &(&str, String)| format!("{{ protocol: {protocol}, listen: '{at}' }}");
    let portals: Vec<_> = portals.iter().map(portal).collect();
    let portals = portals.join(", ");
    format!(
        "backends: {{ {backends} }}\n\
         targets:\n\
         - name: t\n\
         \x20 iqn: {iqn}\n\
         \x20 portals: [{portals}]\n\
         \x20 luns: {{ {luns} }}\n\
         \x20 access: open\n\
         {rest}"
    )
}
