//! Messages of workers to each other, and of the server to them.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use riser_reactor::{MailSender, SendError};
use riser_scsi::attention::Attention;
use riser_scsi::iscsi::Cid;
use riser_scsi::srp::{InitiatorPortId, TargetPortId};
use riser_transport::roce::ForwardedPacket;

use super::device::DeviceInfo;
use super::listener::TcpListener;
use super::portals::{Stage, StageError};
use crate::config::Protocol;
use crate::fabric::{TaskRef, UnitIdx};
use crate::iscsi::{ReassignRequest, ReassignedTask};
use crate::qos::{IoLimits, Waits};
use crate::srp::{ChState, ChannelParams, Counters};
use crate::stats::{Functions, SessionStats, Tally};

/// Messages that a worker's mailbox holds.
pub const MAILBOX: usize = 4096;

/// A message to a worker.
#[derive(Debug)]
pub enum Mail {
    /// A packet that reached the wrong worker.
    Forwarded {
        /// The device's place among the worker's devices: the same for all workers.
        device: usize,
        /// Packet with the number of its worker.
        packet: ForwardedPacket,
    },
    /// A task of a channel of this worker may start.
    StartTask(TaskRef),
    /// A task of a channel of this worker is to be aborted.
    AbortTask {
        /// Name of the task at its connection.
        task: TaskRef,
        /// Function that waits for its end.
        watcher: TaskRef,
    },
    /// A task that a function of this worker waits for is gone.
    TaskGone(TaskRef),
    /// End a connection: a new login of its session takes its place.
    Terminate {
        /// Its number at this worker.
        serial: u64,
    },
    /// The channels that a channel waits for hold nothing any longer.
    OthersGone {
        /// Its number at this worker.
        serial: u64,
    },
    /// An iSCSI channel was logged out for recovery.
    Detach {
        /// Its number at this worker.
        serial: u64,
    },
    /// Another connection of an iSCSI channel's session is lost.
    Lost {
        /// The channel's number at this worker.
        serial: u64,
        /// The connection that is lost.
        cid: Cid,
    },
    /// A command of an iSCSI channel of this worker goes to another one.
    Reassign(ReassignRequest),
    /// A command that an iSCSI channel of this worker takes over, or nothing where it has ended.
    Reassigned {
        /// The context that waits for it.
        to: TaskRef,
        /// The command; none if it has ended.
        moved: Option<Box<ReassignedTask>>,
    },
    /// An iSCSI channel may have its session's next command.
    TakeTurn {
        /// Its number at this worker.
        serial: u64,
    },
    /// Ask the initiator of a channel to log out; end it at `until`.
    LogOut {
        /// Its number at this worker.
        serial: u64,
        /// Time at which the connection is cut.
        until: Instant,
    },
    /// Something happened to a unit.
    Event {
        /// Number of the unit, on all workers.
        unit: UnitIdx,
        /// Event, as a unit attention.
        attention: Attention,
    },
    /// Acquire what serving another catalog takes, and say whether that was possible.
    Stage(Box<Stage>, Sender<Result<(), StageError>>),
    /// What was staged is withdrawn: release it.
    Unstage,
    /// The registry has another catalog.
    Changed,
    /// Accept no further connections; let sessions finish until then, and log them out.
    Shutdown {
        /// Time up to which sessions may finish.
        until: Instant,
    },
    /// Make everything that was written durable, then report.
    Flush,
    /// Leave the loop, which ends the worker's thread.
    Exit,
    /// Say what the worker has done, and for whom.
    Snapshot(Sender<Snapshot>),
    /// Say that the worker gets round.
    Ping(Sender<()>),
    /// Give duplicates of the sockets that listen for iSCSI.
    Listeners(Sender<std::io::Result<Vec<TcpListener>>>),
}

/// A session's channel, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// The worker that has it.
    pub worker: u16,
    /// Number at that worker.
    pub serial: u64,
    /// Number of the I_T nexus.
    pub nexus: u64,
    /// Initiator port identifier, of 16 bytes.
    pub initiator: InitiatorPortId,
    /// Target port identifier, of 16 bytes.
    pub target: TargetPortId,
    /// Address of the initiator's end.
    pub peer: SocketAddr,
    /// Name of the provider of its device.
    pub provider: &'static str,
    /// State of the channel at present.
    pub state: ChState,
    /// Requests that hold a context.
    pub in_flight: usize,
    /// Parameters that were agreed on.
    pub params: ChannelParams,
    /// Logical units that it sees.
    pub luns: usize,
    /// The initiator's limits, and what has waited for them.
    pub limits: Option<(IoLimits, Waits)>,
}

/// A session of iSCSI, over TCP or RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IscsiSession {
    /// Address of the initiator's end.
    pub peer: SocketAddr,
    /// Name of the provider of the RDMA device that carries it, if one does.
    pub provider: Option<&'static str>,
    /// Memory of its connection, in bytes.
    pub memory: usize,
    /// State of the session and of its connection.
    pub info: crate::iscsi::SessionInfo,
}

/// Statistics of a session at a unit.
#[derive(Clone, Debug)]
pub struct SessionAccount {
    /// Protocol of the session.
    pub protocol: Protocol,
    /// Initiator port, as text.
    pub initiator: String,
    /// Statistics, still being counted.
    pub account: Arc<SessionStats>,
}

/// Report of a worker: its counters, and its sessions at present.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Number of the worker; the first is 0.
    pub worker: u16,
    /// Sums over all channels, those that are gone included.
    pub counters: Counters,
    /// Channels of SRP at present.
    pub sessions: Vec<SessionInfo>,
    /// Sums over all iSCSI channels.
    pub iscsi: crate::iscsi::Counters,
    /// Sessions of iSCSI and iSER at present.
    pub iscsi_sessions: Vec<IscsiSession>,
    /// Statistics of the sessions at each unit.
    pub accounts: Vec<SessionAccount>,
    /// Task-management functions that were answered, and how.
    pub functions: Vec<(Protocol, Functions)>,
    /// Logins accepted since the worker began.
    pub logins: Tally<Protocol>,
    /// Logins refused, and why.
    pub rejects: Tally<(Protocol, &'static str)>,
    /// Devices of the worker, closed ones included.
    pub devices: Vec<DeviceInfo>,
    /// RDMA CM ports at which it listens.
    pub rdma_listeners: Vec<SocketAddr>,
    /// TCP ports at which it listens.
    pub tcp_listeners: Vec<SocketAddr>,
    /// Time that its rounds with something to do have taken.
    pub busy: Duration,
    /// Time since the worker began.
    pub ran: Duration,
    /// Size of the data-buffer pool, in bytes.
    pub pool_size: usize,
    /// Bytes of it that are free.
    pub pool_free: usize,
    /// The least that was ever free.
    pub pool_lowest: usize,
    /// Each of its buffers is back, descriptor tables and the reserve included.
    pub pool_is_whole: bool,
    /// Connections of all fabrics, those that have not logged in included.
    pub connections: usize,
    /// Timers of connections, including cancelled ones.
    pub timers: usize,
    /// Messages to other workers that wait for room.
    pub waiting_mail: usize,
    /// Times that the worker slept.
    pub parks: u64,
}

/// The mailboxes of all workers, as one of them sees them.
///
/// A worker never blocks on another: what a full mailbox does not take waits here. That queue is
/// bounded: it holds messages about tasks and logins, of which there are no more than contexts, and
/// events of units, each once. Forwarded packets are dropped, like packets that a full socket
/// buffer drops.
#[derive(Debug)]
pub struct Outbox {
    workers: Vec<Mailbox>,
}

/// The mailbox of one worker, and what it had no room for.
#[derive(Debug)]
struct Mailbox {
    sender: MailSender<Mail>,
    /// In the order in which they were sent. There is one for each worker: in a common one, a
    /// message that is refused once more would go behind the next to the same worker.
    backlog: VecDeque<Mail>,
}

impl Mailbox {
    /// Sends what waits, as far as there is room.
    fn retry(&mut self) {
        while let Some(mail) = self.backlog.pop_front() {
            if let Some(mail) = self.try_send(mail) {
                self.backlog.push_front(mail);
                return;
            }
        }
    }

    /// Whether a message is an event that waits already.
    fn has_event(&self, mail: &Mail) -> bool {
        let of = |mail: &Mail| match mail {
            Mail::Event { unit, attention } => Some((*unit, *attention)),
            _ => None,
        };
        let event = of(mail);
        event.is_some() && self.backlog.iter().any(|waiting| of(waiting) == event)
    }

    /// Returns the message if there is no room and it must not be dropped.
    fn try_send(&self, mail: Mail) -> Option<Mail> {
        match self.sender.send(mail) {
            // A worker that is gone has no channels, and no channel waits for it.
            Ok(()) | Err(SendError::Closed(_) | SendError::Full(Mail::Forwarded { .. })) => None,
            Err(SendError::Full(mail)) => Some(mail),
        }
    }
}

impl Outbox {
    /// An outbox to these workers, by number.
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
        // Not past what waits for the same worker already. Packets may overtake: a network does
        // not keep their order either.
        let waits = !mailbox.backlog.is_empty() && !matches!(mail, Mail::Forwarded { .. });
        // Once says as much as twice, and an initiator may cause resets without end.
        if waits && mailbox.has_event(&mail) {
            return;
        }
        let refused = match waits {
            true => Some(mail),
            false => mailbox.try_send(mail),
        };
        mailbox.backlog.extend(refused);
    }

    /// Sends again what full mailboxes refused, as far as they have room now.
    pub fn retry(&mut self) {
        self.workers.iter_mut().for_each(Mailbox::retry);
    }

    /// Returns the number of messages that wait for room.
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
    fn events_that_are_caused_without_end_wait_once() {
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

    /// The receiver takes messages while those that it had no room for are sent again.
    #[test]
    fn messages_arrive_in_their_order_while_the_receiver_takes_some() {
        const COUNT: u64 = 100_000;
        let ring = Ring::new(RingConfig::default()).unwrap();
        let (sender, mut receiver) = mailbox(2, ring.waker());
        let sending = std::thread::spawn(move || {
            let mut outbox = Outbox::new(vec![sender]);
            for serial in 0..COUNT {
                outbox.send(0, Mail::OthersGone { serial });
                // So that several wait at once.
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
