//! Requests of a channel to its worker.

use riser_scsi::iscsi::login::SessionParams;

use super::reassigned::ReassignRequest;
use crate::fabric::{ConnRef, TaskAction};

/// Request from a channel to its worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Request for a command or function.
    Task(TaskAction),
    /// Notify another connection of the session that it might have the next command.
    TakeTurn(ConnRef),
    /// Terminate all other connections of the session, then call [`Channel::handle_others_gone`](super::Channel::handle_others_gone).
    EndOthers,
    /// The connection was lost and its commands are kept. Another connection of this session should
    /// be notified by calling [`Channel::handle_lost`](super::Channel::handle_lost).
    Lost,
    /// The commands of this connection can now be claimed. The connection that requested the logout
    /// must be notified.
    Detached,
    /// Notify the channel owning a command that it's claimed by a TASK REASSIGN: call
    /// [`Channel::handle_reassign`](super::Channel::handle_reassign).
    Reassign(ReassignRequest),
    /// Pass the result of [`Channel::take_reassigned`](super::Channel::take_reassigned) to [`Channel::handle_reassigned`](super::Channel::handle_reassigned).
    DeliverTask,
    /// Close the connection, then call [`Channel::handle_disconnected`](super::Channel::handle_disconnected).
    Disconnect,
    /// The channel has released all resources.
    Release,
}

/// How a connection is terminated by another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Abort all commands.
    Terminate,
    /// Keep the commands so that other connections can claim them.
    Detach,
}

impl Ending {
    /// Returns how to terminate a connection when it's reinstated (RFC 7143 6.3.4).
    pub fn of_reinstatement(params: &SessionParams) -> Self {
        if params.error_recovery_level > 1 {
            Self::Detach
        } else {
            Self::Terminate
        }
    }
}
