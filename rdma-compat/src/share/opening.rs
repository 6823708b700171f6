//! Opening an address that may be shared with other processes.

use std::collections::VecDeque;
use std::io;
use std::iter;
use std::mem;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use riser_transport::roce::driver::bind_group;
use riser_transport::roce::steer::Requests;
use riser_transport::wire::ROCE_PORT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno as Os;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, send,
    socketpair, sockopt,
};
use tracing::warn;

use super::mail::{MESSAGE, Message, Received, is_there, name, new_mailbox, receive, receive_with};
use crate::port_table::{BITS, PortTable, SLOTS};

/// Time for a process to respond to another process that opens the device.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Maximum time to wait for other processes that open the address sequentially.
pub(crate) const LONGEST: Duration = Duration::from_secs(30);

/// Time until the port is free after its last process has exited.
const LEAVING: Duration = Duration::from_millis(200);

/// Intervals for checking again, and for repeating a query.
pub(super) const PAUSE: Duration = Duration::from_millis(2);
const REMINDER: Duration = Duration::from_millis(20);

/// Size of the socket buffer for requests, in bytes.
const FRONT_BUFFER: usize = 512 << 10;

/// The right to open an address. Otherwise two concurrent processes could both assume that they are
/// the first.
pub(crate) struct Opening {
    pub(super) addr: IpAddr,
    /// Its name grants the right.
    _mailbox: OwnedFd,
}

impl Opening {
    /// Acquires the right. Returns `None` if another process holds it. The current process must not
    /// fork until it is released.
    ///
    /// # Errors
    /// Returns errors of creating a socket.
    pub(crate) fn begin(addr: IpAddr) -> io::Result<Option<Self>> {
        let mailbox = new_mailbox()?;
        match bind(&mailbox, &name(addr, None)?) {
            Ok(()) => Ok(Some(Self {
                addr,
                _mailbox: mailbox,
            })),
            Err(Os::ADDRINUSE) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// A process that is opening an address. This is a socket connected to it, and not to any process
/// that opens the address later.
pub(super) struct Opener(OwnedFd);

impl Opener {
    pub(super) fn of(addr: IpAddr) -> io::Result<Option<Self>> {
        let socket = new_mailbox()?;
        match connect(&socket, &name(addr, None)?) {
            Ok(()) => Ok(Some(Self(socket))),
            Err(Os::CONNREFUSED) => Ok(None),
            // It is connected to a different socket, which is never the case for processes with
            // this library.
            Err(Os::PERM) => Err(unfinished()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns whether it has not finished yet.
    pub(super) fn is_opening(&self) -> bool {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = send(&self.0, &[Message::Probe as u8], flags);
        matches!(sent, Ok(_) | Err(Os::AGAIN))
    }
}

/// Waits until no process is opening an address. On a busy machine, many processes may open it
/// sequentially, so each of them has its own timeout. `pause` waits and returns the current time.
pub(super) fn await_openers(
    addr: IpAddr,
    until: Instant,
    mut pause: impl FnMut(Duration) -> Instant,
) -> io::Result<()> {
    while let Some(opener) = Opener::of(addr)? {
        let mut now = pause(Duration::ZERO);
        let its_end = until.min(now + PATIENCE);
        while opener.is_opening() {
            if now >= its_end {
                return Err(unfinished());
            }
            now = pause(PAUSE);
        }
    }
    Ok(())
}

/// The error if the address is being opened by another process, which does not finish.
fn unfinished() -> io::Error {
    in_use("another process is opening it and does not finish; it may be stopped")
}

/// The error if the port of the address is in use, with a reason that helps to free it.
pub(super) fn in_use(why: &str) -> io::Error {
    let why = format!(
        "UDP port {ROCE_PORT} is in use: {why} (`ss -aunp 'sport = {ROCE_PORT}'` lists processes)"
    );
    io::Error::new(io::ErrorKind::AddrInUse, why)
}

/// Bit mask of slots that are not expected to respond, because their processes are silent, or
/// belong to another user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Silent(pub(super) u32);

/// Waits for the processes at an address, some of which may be stopped. Returns when no process is
/// opening the address, which may take up to `until`, and one of its processes has responded. If
/// all processes are silent, returns their slots. The current process may fork during this call,
/// and the child keeps the mailbox with all pending messages, so we don't request anything that
/// includes descriptors.
///
/// # Errors
/// Returns `EADDRINUSE` if a process does not finish opening the address, and errors of creating a
/// socket.
pub(crate) fn await_others(addr: IpAddr, until: Instant) -> io::Result<Silent> {
    await_openers(addr, until, |pause| {
        thread::sleep(pause);
        Instant::now()
    })?;
    let mailbox = new_mailbox()?;
    let mut inquiry = Inquiry::new(&mailbox, addr, Message::Ask, Silent::default());
    let mut foreign = Vec::new();
    loop {
        match inquiry.poll()? {
            InquiryResult::Mail => match receive(&mailbox, &mut [0; 1]) {
                Some(Received::OfAnotherUser(Some(from))) => foreign.extend(inquiry.strike(&from)),
                Some(Received::Message {
                    from: Some(from), ..
                }) if inquiry.slot(&from).is_some() => return Ok(Silent::default()),
                _ => {}
            },
            InquiryResult::Vacant | InquiryResult::Silence(_) => {
                let asked = inquiry.asked.iter().map(|asked| asked.slot);
                let silent = asked.chain(foreign);
                return Ok(Silent(silent.fold(0, |bits, slot| bits | 1 << slot)));
            }
        }
    }
}

/// Queries to the processes of an address. One additional slot is queried at a time, because a
/// single response is sufficient, but a process that is stopped must not prevent further queries.
pub(super) struct Inquiry<'a> {
    mailbox: &'a OwnedFd,
    addr: IpAddr,
    /// [`Message::Ask`] or [`Message::Join`].
    question: Message,
    /// Slots that were not queried yet.
    rest: VecDeque<u8>,
    /// Slots with processes that were queried and have not responded yet.
    asked: Vec<PendingSlot>,
    /// Slots that were silent before.
    silent: Silent,
    start: Instant,
}

/// A slot that was queried.
struct PendingSlot {
    slot: u8,
    /// Socket pair that receives the sockets of the address, if they were requested.
    answers: Option<ResponsePair>,
}

/// Result of an [`Inquiry`] after a [`REMINDER`].
pub(super) enum InquiryResult {
    /// There may be a message in the mailbox or in one of the socket pairs.
    Mail,
    /// No slot has a process that could respond.
    Vacant,
    /// Neither the process in this slot nor any other process responds.
    Silence(u8),
}

impl<'a> Inquiry<'a> {
    pub(super) fn new(
        mailbox: &'a OwnedFd,
        addr: IpAddr,
        question: Message,
        silent: Silent,
    ) -> Self {
        Self {
            mailbox,
            addr,
            question,
            rest: (1..SLOTS).collect(),
            asked: Vec::new(),
            silent,
            start: Instant::now(),
        }
    }

    /// Returns the timeout for responses. If all processes were silent before, they are only
    /// queried once more.
    fn patience(&self) -> Duration {
        let was_silent = |asked: &PendingSlot| self.silent.0 >> asked.slot & 1 == 1;
        match self.asked.iter().all(was_silent) {
            true => REMINDER,
            false => PATIENCE,
        }
    }

    /// Sends queries, and waits for a short time.
    ///
    /// # Errors
    /// Returns errors of sending.
    pub(super) fn poll(&mut self) -> io::Result<InquiryResult> {
        if self.rest.is_empty()
            && self.start.elapsed() >= self.patience()
            && let Some(asked) = self.asked.first()
        {
            return Ok(InquiryResult::Silence(asked.slot));
        }
        for PendingSlot { slot, answers } in mem::take(&mut self.asked) {
            self.send_inquiry(slot, answers)?;
        }
        while let Some(slot) = self.rest.pop_front() {
            let joins = self.question == Message::Join;
            if self.send_inquiry(slot, joins.then(ResponsePair::new).transpose()?)? {
                break;
            }
        }
        if self.asked.is_empty() {
            return Ok(InquiryResult::Vacant);
        }
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: REMINDER.subsec_nanos().into(),
        };
        let answers = self.asked.iter().filter_map(|asked| asked.answers.as_ref());
        let inputs = iter::once(self.mailbox).chain(answers.map(|answers| &answers.from));
        let mut inputs: Vec<_> = inputs.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        // If this is interrupted by a signal, there is no message.
        let _ = poll(&mut inputs, Some(&pause));
        Ok(InquiryResult::Mail)
    }

    /// Queries a slot. Returns whether it has a process.
    fn send_inquiry(&mut self, slot: u8, answers: Option<ResponsePair>) -> io::Result<bool> {
        let to = answers.as_ref().map(|answers| answers.to.as_fd());
        let name = name(self.addr, Some(slot))?;
        let is_there = is_there(self.mailbox, &name, self.question, to.as_slice())?;
        if is_there {
            self.asked.push(PendingSlot { slot, answers });
        }
        Ok(is_there)
    }

    /// Stops querying the slot with this address, and returns the slot.
    fn strike(&mut self, from: &SocketAddrUnix) -> Option<u8> {
        let slot = self.slot(from);
        self.asked.retain(|asked| Some(asked.slot) != slot);
        slot
    }

    /// Returns the queried slot with this address.
    fn slot(&self, from: &SocketAddrUnix) -> Option<u8> {
        let mut asked = self.asked.iter().map(|asked| asked.slot);
        asked.find(|slot| name(self.addr, Some(*slot)).is_ok_and(|name| name == *from))
    }
}

/// State that processes sharing an address pass to a new process.
pub(super) enum JoinResult {
    /// The sockets and the table.
    Welcome(Vec<OwnedFd>, OwnedFd),
    /// There was no response. If the port is in use, this is the reason.
    Nothing { why: String },
}

/// Reasons why an address is in use.
const NO_LIBRARY: &str = "it belongs to a process without this library, such as riserd, to a \
             device that has it as a further address, or to the kernel's rdma_rxe, which uses all addresses";
pub(super) const OTHER_VERSION: &str =
    "it belongs to a process with another version of this library";
const OTHER_USER: &str = "it belongs to a process of another user";

/// A socket pair for the response of one process. A malicious process that uses the name of its
/// slot also gets one end, but the pair is permanently connected, so it can't be used by other
/// processes.
pub(super) struct ResponsePair {
    /// Passed to the process that is queried.
    pub(super) to: OwnedFd,
    pub(super) from: OwnedFd,
}

impl ResponsePair {
    pub(super) fn new() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (to, from) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        sockopt::set_socket_passcred(&from, true)?;
        Ok(Self { to, from })
    }
}

/// Requests the sockets and the table from the processes of an address, for the process in a slot.
///
/// # Errors
/// Returns `EMFILE` if this process can't have this number of descriptors.
pub(super) fn join(
    mailbox: &OwnedFd,
    addr: IpAddr,
    slot: u8,
    silent: Silent,
) -> io::Result<JoinResult> {
    let mut inquiry = Inquiry::new(mailbox, addr, Message::Join, silent);
    inquiry.rest.retain(|other| *other != slot);
    let mut buffer = [0; MESSAGE];
    // Names may be used by another user, who may also respond, so only the kernel can tell whether
    // the port is free.
    let mut refusal = None;
    let silent = loop {
        match inquiry.poll()? {
            InquiryResult::Mail => {}
            InquiryResult::Vacant => break None,
            InquiryResult::Silence(slot) => {
                warn!(%addr, slot, "unresponsive process with this address");
                break Some(slot);
            }
        }
        // Messages may also be sent by unrelated processes.
        let (from, why) = match receive(mailbox, &mut buffer) {
            Some(Received::OfAnotherUser(from)) => (from, OTHER_USER),
            Some(Received::Message { kind, from, .. }) if kind == Message::Welcome as u8 => {
                (from, OTHER_VERSION)
            }
            _ => (None, ""),
        };
        if from.is_some_and(|from| inquiry.strike(&from).is_some()) {
            refusal = Some(why);
        }
        let mut welcome = None;
        inquiry.asked.retain(|asked| {
            let Some(answers) = &asked.answers else {
                return true;
            };
            let mut all = Vec::new();
            match receive_with(&answers.from, &mut buffer, &mut all) {
                None => true,
                Some(Received::Message { kind, .. }) if kind == Message::Welcome as u8 => {
                    welcome = Some(all);
                    true
                }
                // It was closed, or the message was not sent by a process with this library.
                Some(_) => {
                    refusal = Some(OTHER_USER);
                    false
                }
            }
        });
        let Some(mut all) = welcome else {
            continue;
        };
        if all.len() != usize::from(SLOTS) + 1 {
            // The kernel has dropped descriptors for which there was no space.
            return Err(Os::MFILE.into());
        }
        if let Some(table) = all.pop() {
            return Ok(JoinResult::Welcome(all, table));
        }
    };
    let why = match (refusal, silent) {
        (Some(why), _) => why.into(),
        (None, Some(slot)) => {
            format!(
                "it belongs to the process in slot {slot}, which does not respond; it may be stopped"
            )
        }
        (None, None) => NO_LIBRARY.into(),
    };
    Ok(JoinResult::Nothing { why })
}

/// Creates the sockets and the table.
pub(super) fn begin(addr: IpAddr) -> io::Result<(Vec<OwnedFd>, OwnedFd)> {
    let until = Instant::now() + LEAVING;
    let group = loop {
        match bind_group(addr, BITS, Requests::ToFirst) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                thread::sleep(PAUSE);
            }
            group => break group?,
        }
    };
    sockopt::set_socket_recv_buffer_size(&group[0], FRONT_BUFFER)?;
    Ok((group, PortTable::make()?))
}
