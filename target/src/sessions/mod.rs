//! Sessions and what is served to them: shared by all workers, and touched at login, logout and
//! changes of the configuration only.
//!
//! A session holds a [`Permit`](budget::Permit) of the budget and its entries at the units
//! (`units::UnitEntries`), and each of its connections a [`SessionGuard`](guard::SessionGuard). All
//! of them undo themselves when they are dropped. So a login that fails half-way leaves nothing
//! behind, and a session that ends is simply removed from its table.
//!
//! # Modules
//! - [`catalog`]: what is served, to whom.
//! - [`nexus`]: SRP's sessions, and the numbers of all I_T nexuses.
//! - [`iscsi`]: sessions of iSCSI, over TCP and RDMA.
//! - [`blocklist`]: initiators that an administrator keeps out.
//! - [`guard`]: a connection's part in its session, over every fabric.
//! - [`budget`]: how many sessions there may be. `units`: where a nexus is entered at its units.
//! - `waits`: channels that wait until others have ended.
//! - [`unconfirmed`]: which connection gives way to a newer one before it has proved anything.
//! - `recent`: units that the initiators of sessions which have just ended take their LUNs for.

pub mod blocklist;
pub mod budget;
pub mod catalog;
pub mod guard;
#[cfg(test)]
mod interleavings;
pub mod iscsi;
pub mod nexus;
mod recent;
pub mod unconfirmed;
mod units;
mod waits;
