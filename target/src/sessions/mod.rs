//! Sessions and the catalog, which are shared by all workers. They are only accessed for login,
//! logout and configuration changes.
//!
//! A session holds a [`Permit`](budget::Permit) from the budget and entries at its units
//! (`units::UnitEntries`), and each connection holds a [`SessionGuard`](guard::SessionGuard). All
//! of these are released on drop. Therefore, a failed login leaves no state behind, and to close a
//! session, we only need to remove it from its table.
//!
//! # Modules
//! - [`catalog`]: targets and access rules.
//! - [`nexus`]: SRP sessions, and the numbers of all I_T nexuses.
//! - [`iscsi`]: iSCSI sessions, over TCP and RDMA.
//! - [`blocklist`]: initiators blocked by an administrator.
//! - [`guard`]: membership of a connection in its session, for any fabric.
//! - [`budget`]: limits for the number of sessions. `units`: entries of a nexus at its units.
//! - `waits`: channels waiting for other channels to close.
//! - [`unconfirmed`]: selects a connection to drop for a newer one, while neither is verified.
//! - `recent`: units by LUN, as last seen by the initiators of recently closed sessions.

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
