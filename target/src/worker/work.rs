//! Identifiers of work requests and block operations, used to find the connection for a completion.

use riser_transport::verbs::WrId;

use super::conns::ConnKey;
use crate::fabric::TaskIdx;
use crate::iser::{ChainIdx, RxIdx};
use crate::srp::RecvIdx;

/// Type of work request. The type is stored in the top byte of the identifier and the context in
/// the other bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Receive of an SRP channel.
    Recv(RecvIdx),
    /// Last request of a chain.
    Post(TaskIdx),
    /// Any other request of a chain, which only completes on error.
    Inner,
    /// Drain marker: a zero-length write after all other requests.
    Drain,
    /// Probe: a zero-length write that is acknowledged by the peer's device.
    Probe,
    /// Receive of an iSER connection.
    IserRecv(RxIdx),
    /// Last request of a chain for an iSER connection.
    IserPost(ChainIdx),
    /// Marker after an SRP chain that was partially posted.
    Torn(TaskIdx),
    /// Marker after an iSER chain that was partially posted.
    IserTorn(ChainIdx),
}

impl Work {
    const KIND: u64 = 56;

    pub(super) fn id(self) -> WrId {
        WrId(match self {
            Self::Recv(idx) => 1 << Self::KIND | u64::from(idx.0),
            Self::Post(idx) => 2 << Self::KIND | u64::from(idx.0),
            Self::Inner => 3 << Self::KIND,
            Self::Drain => 4 << Self::KIND,
            Self::Probe => 5 << Self::KIND,
            Self::IserRecv(idx) => 6 << Self::KIND | u64::from(idx.0),
            Self::IserPost(idx) => 7 << Self::KIND | u64::from(idx.0),
            Self::Torn(idx) => 8 << Self::KIND | u64::from(idx.0),
            Self::IserTorn(idx) => 9 << Self::KIND | u64::from(idx.0),
        })
    }

    /// # Panics
    /// Panics if the identifier is invalid.
    pub(super) fn of(id: WrId) -> Self {
        match id.0 >> Self::KIND {
            1 => Self::Recv(RecvIdx(id.0 as u16)),
            2 => Self::Post(TaskIdx(id.0 as u16)),
            3 => Self::Inner,
            4 => Self::Drain,
            5 => Self::Probe,
            6 => Self::IserRecv(RxIdx(id.0 as u16)),
            7 => Self::IserPost(ChainIdx(id.0 as u16)),
            8 => Self::Torn(TaskIdx(id.0 as u16)),
            9 => Self::IserTorn(ChainIdx(id.0 as u16)),
            other => panic!("no work request of ours has kind {other}"),
        }
    }
}

/// Task of a connection with a pending block operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) conn: ConnKey,
    pub(super) task: TaskIdx,
}

impl Owner {
    /// Returns the user value for the driver.
    pub(super) fn user(self) -> u64 {
        (self.conn.0 as u64) << 16 | u64::from(self.task.0)
    }

    /// Returns the owner for a user value.
    pub(super) fn of(user: u64) -> Self {
        Self {
            conn: ConnKey((user >> 16) as usize),
            task: TaskIdx(user as u16),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_requests_keep_their_names() {
        for work in [
            Work::Recv(RecvIdx(u16::MAX)),
            Work::Post(TaskIdx(1)),
            Work::Inner,
            Work::Drain,
            Work::Probe,
            Work::IserRecv(RxIdx(2)),
            Work::IserPost(ChainIdx(3)),
            Work::Torn(TaskIdx(4)),
            Work::IserTorn(ChainIdx(5)),
        ] {
            assert_eq!(Work::of(work.id()), work);
        }
    }
}
