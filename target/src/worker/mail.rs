//! Messages between workers, and from the server to workers.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use riser_reactor::{MailSender, SendError};
use riser_scsi::attention::Attention;
use riser_scsi::iscsi::Cid;
use riser_scsi::srp::{InitiatorPortId, TargetPortId};
use riser_transport::roce::ForwardedPacket;

use super::device::DeviceInfo;
use super::listener::TcpListener;
use super::portals::{Stage, StageError};
use crate::backend::Store;
use crate::config::Protocol;
use crate::fabric::{TaskRef, UnitIdx};
use crate::iscsi::{ReassignRequest, ReassignedTask};
use crate::qos::{IoLimits, Waits};
use crate::srp::{ChState, ChannelParams, Counters};
use crate::stats::{Functions, SessionStats, Tally};

/// Mailbox size in messages.
pub const MAILBOX: usize = 4096;

/// Message to a worker.
#[derive(Debug)]
pub enum Mail {
    /// A packet received by the wrong worker.
    Forwarded {
        /// Device index, which is the same for all workers.
        device: usize,
        /// Packet and its worker index.
        packet: ForwardedPacket,
    },
    /// A task of this worker can start.
    StartTask(TaskRef),
    /// Abort a task of this worker.
    AbortTask {
        /// Task to abort.
        task: TaskRef,
        /// Function waiting for the abort.
        watcher: TaskRef,
    },
    /// A task that a function of this worker is waiting for has completed.
    TaskGone(TaskRef),
    /// Terminate a connection, because it is replaced by a new login.
    Terminate {
        /// Serial number of the connection.
        serial: u64,
    },
    /// All connections that a channel was waiting for have been closed.
    OthersGone {
        /// Serial number of the connection.
        serial: u64,
    },
    /// An iSCSI connection was logged out for recovery.
    Detach {
        /// Serial number of the connection.
        serial: u64,
    },
    /// Another connection of an iSCSI session was lost.
    Lost {
        /// Serial number of the connection to notify.
        serial: u64,
        /// Lost connection.
        cid: Cid,
    },
    /// A command of this worker was claimed by another iSCSI connection.
    Reassign(ReassignRequest),
    /// Hands over a command to an iSCSI connection of this worker.
    Reassigned {
        /// Context for this command.
        to: TaskRef,
        /// Command, or `None` if it has completed.
        moved: Option<Box<ReassignedTask>>,
    },
    /// The next command of an iSCSI session may be on this connection.
    TakeTurn {
        /// Serial number of the connection.
        serial: u64,
    },
    /// Request a logout and close the connection at `until`.
    LogOut {
        /// Serial number of the connection.
        serial: u64,
        /// Time to close the connection.
        until: Instant,
    },
    /// Unit event.
    Event {
        /// Unit index, which is the same for all workers.
        unit: UnitIdx,
        /// Event to report as a unit attention.
        attention: Attention,
    },
    /// Acquire the resources for a new catalog and send the result.
    Stage(Box<Stage>, Sender<Result<(), StageError>>),
    /// Release the resources for a new catalog, because it will not be used.
    Unstage,
    /// The catalog was updated in the registry.
    Changed,
    /// Stop accepting connections, and log out all sessions.
    Shutdown {
        /// Time when remaining sessions will be closed.
        until: Instant,
    },
    /// Pause the listeners, and log out all sessions. This is reported in the same way as a
    /// shutdown, but [`Mail::Resume`] can revert it.
    Drain {
        /// Time when remaining sessions will be closed.
        until: Instant,
    },
    /// Resume normal operation after [`Mail::Drain`].
    Resume(Sender<()>),
    /// Flush all written data to stable storage, then report this number.
    Flush(u64),
    /// Return the oldest pending block operation of each backend.
    OldestRequests(Sender<Vec<OldestRequest>>),
    /// Stop the worker thread.
    Exit,
    /// Return the current counters and sessions.
    Snapshot(Sender<Snapshot>),
    /// Respond to show that the worker is running.
    Ping(Sender<()>),
    /// Return duplicates of the listening sockets for iSCSI.
    Listeners(Sender<std::io::Result<Vec<TcpListener>>>),
}

/// Oldest pending block operation for a backend of a worker.
#[derive(Clone, Debug)]
pub struct OldestRequest {
    /// Backend, which might have been removed.
    pub store: Weak<Store>,
    /// Backend label.
    pub backend: String,
    /// Time when it was submitted.
    pub since: Instant,
}

/// SRP session information for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Worker index.
    pub worker: u16,
    /// Serial number of the connection.
    pub serial: u64,
    /// I_T nexus.
    pub nexus: u64,
    /// Initiator port identifier (16 bytes).
    pub initiator: InitiatorPortId,
    /// Target port identifier (16 bytes).
    pub target: TargetPortId,
    /// Initiator address.
    pub peer: SocketAddr,
    /// Provider name of the device.
    pub provider: &'static str,
    /// Current channel state.
    pub state: ChState,
    /// Number of requests with a context.
    pub in_flight: usize,
    /// Negotiated parameters.
    pub params: ChannelParams,
    /// Number of visible logical units.
    pub luns: usize,
    /// Rate limits for the initiator, and the current wait times.
    pub limits: Option<(IoLimits, Waits)>,
}

/// iSCSI session over TCP or RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IscsiSession {
    /// Serial number of the connection.
    pub serial: u64,
    /// Initiator address.
    pub peer: SocketAddr,
    /// Provider name of the RDMA device, if any.
    pub provider: Option<&'static str>,
    /// Memory used by the connection, in bytes.
    pub memory: usize,
    /// State of the session and its connection.
    pub info: crate::iscsi::SessionInfo,
}

/// Session statistics for a unit.
#[derive(Clone, Debug)]
pub struct SessionAccount {
    /// Session protocol.
    pub protocol: Protocol,
    /// Initiator port for display.
    pub initiator: Arc<str>,
    /// Statistics, which are still being updated.
    pub account: Arc<SessionStats>,
}

/// Worker counters and current sessions.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Worker index, starting with 0.
    pub worker: u16,
    /// Total for all channels, including closed ones.
    pub counters: Counters,
    /// Current SRP channels.
    pub sessions: Vec<SessionInfo>,
    /// Total for all iSCSI channels.
    pub iscsi: crate::iscsi::Counters,
    /// Current iSCSI and iSER sessions.
    pub iscsi_sessions: Vec<IscsiSession>,
    /// Session statistics for each unit.
    pub accounts: Vec<SessionAccount>,
    /// Number of task-management functions by response.
    pub functions: Vec<(Protocol, Functions)>,
    /// Accepted logins since the worker was started.
    pub logins: Tally<Protocol>,
    /// Refused logins by reason.
    pub rejects: Tally<(Protocol, &'static str)>,
    /// Worker devices, including closed ones.
    pub devices: Vec<DeviceInfo>,
    /// Listening RDMA CM ports.
    pub rdma_listeners: Vec<SocketAddr>,
    /// Listening TCP ports.
    pub tcp_listeners: Vec<SocketAddr>,
    /// Total time used by rounds with work.
    pub busy: Duration,
    /// Time since the worker was started.
    pub ran: Duration,
    /// Pool size in bytes.
    pub pool_size: usize,
    /// Free pool memory in bytes.
    pub pool_free: usize,
    /// Minimum free pool memory since the start, in bytes.
    pub pool_lowest: usize,
    /// Set if all buffers are free, including descriptor tables and the reserve.
    pub pool_is_whole: bool,
    /// Number of connections for all fabrics, including those before login.
    pub connections: usize,
    /// Number of connection timers, including stale ones.
    pub timers: usize,
    /// Number of messages waiting to be sent to other workers.
    pub waiting_mail: usize,
    /// Number of times the worker was sleeping.
    pub parks: u64,
}

/// Mailboxes of all workers, used by one of them to send mail.
///
/// A worker must not block if another worker is busy, so messages to a full mailbox are added to a
/// queue. The size of this queue is limited: it contains messages for tasks and logins, which is
/// limited by the number of contexts, and unit events without duplicates. Forwarded packets are
/// dropped, like in a full socket buffer.
#[derive(Debug)]
pub struct Outbox {
    workers: Vec<Mailbox>,
}

/// Mailbox of a worker and the messages waiting for it.
#[derive(Debug)]
struct Mailbox {
    sender: MailSender<Mail>,
    /// Messages in the order they were sent. We need a separate queue for each worker: with a
    /// single queue, a message would be added again after newer messages to the same worker.
    backlog: VecDeque<Mail>,
}

impl Mailbox {
    /// Sends waiting messages until the mailbox is full.
    fn retry(&mut self) {
        while let Some(mail) = self.backlog.pop_front() {
            if let Some(mail) = self.try_send(mail) {
                self.backlog.push_front(mail);
                return;
            }
        }
    }

    /// Returns true if this is an event which is already in the queue.
    fn has_event(&self, mail: &Mail) -> bool {
        let of = |mail: &Mail| match mail {
            Mail::Event { unit, attention } => Some((*unit, *attention)),
            _ => None,
        };
        let event = of(mail);
        event.is_some() && self.backlog.iter().any(|waiting| of(waiting) == event)
    }

    /// Returns the message if the mailbox is full and it must not be dropped.
    fn try_send(&self, mail: Mail) -> Option<Mail> {
        match self.sender.send(mail) {
            // A stopped worker has no channels, and no channel is waiting for it.
            Ok(()) | Err(SendError::Closed(_) | SendError::Full(Mail::Forwarded { .. })) => None,
            Err(SendError::Full(mail)) => Some(mail),
        }
    }
}

impl Outbox {
    /// Creates an outbox with a sender for each worker.
    #[must_use]
    pub fn new(senders: Vec<MailSender<Mail>>) -> Self {
        let mailbox = |sender| Mailbox {
            sender,
            backlog: VecDeque::new(),
        };
        Self {
            workers: senders.into_iter().map(mailbox).collect(),
        }
    }

    /// Returns the number of workers.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Sends a message to a worker.
    pub fn send(&mut self, worker: usize, mail: Mail) {
        let Some(mailbox) = self.workers.get_mut(worker) else {
            return;
        };
        // Keep the order if there are other messages in the queue for this worker. This isn't
        // required for packets, because they can be reordered by a network as well.
        let waits = !mailbox.backlog.is_empty() && !matches!(mail, Mail::Forwarded { .. });
        // We only need a single event, and an initiator could cause any number of resets.
        if waits && mailbox.has_event(&mail) {
            return;
        }
        let refused = match waits {
            true => Some(mail),
            false => mailbox.try_send(mail),
        };
        mailbox.backlog.extend(refused);
    }

    /// Sends messages that are still waiting, if there is room now.
    pub fn retry(&mut self) {
        self.workers.iter_mut().for_each(Mailbox::retry);
    }

    /// Returns the number of waiting messages.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.workers
            .iter()
            .map(|mailbox| mailbox.backlog.len())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use riser_reactor::{Ring, RingConfig, mailbox};

    use super::*;

    #[test]
    fn repeated_events_are_queued_once() {
        let ring = Ring::new(RingConfig::default()).unwrap();
        let (sender, mut receiver) = mailbox(2, ring.waker());
        let mut outbox = Outbox::new(vec![sender]);
        for n in 0..10_000 {
            let unit = UnitIdx(n % 4);
            let attention = Attention::DeviceReset;
            outbox.send(0, Mail::Event { unit, attention });
        }
        assert_eq!(outbox.waiting(), 4);
        let taken = std::iter::from_fn(|| {
            let mail = receiver.poll_message();
            outbox.retry();
            mail
        });
        assert_eq!(taken.count(), 6);
    }

    /// The receiver reads messages while we try to send the waiting messages.
    #[test]
    fn messages_keep_order_with_concurrent_receiver() {
        const COUNT: u64 = 100_000;
        let ring = Ring::new(RingConfig::default()).unwrap();
        let (sender, mut receiver) = mailbox(2, ring.waker());
        let sending = std::thread::spawn(move || {
            let mut outbox = Outbox::new(vec![sender]);
            for serial in 0..COUNT {
                outbox.send(0, Mail::OthersGone { serial });
                // This ensures that there are several waiting messages.
                if serial % 8 == 0 {
                    outbox.retry();
                }
            }
            while outbox.waiting() > 0 {
                outbox.retry();
            }
        });
        let mut next = 0;
        while next < COUNT {
            if let Some(mail) = receiver.poll_message() {
                assert!(
                    matches!(mail, Mail::OthersGone { serial } if serial == next),
                    "{next} is next, not {mail:?}"
                );
                next += 1;
            }
        }
        sending.join().unwrap();
    }
}
