//! How a process comes to an address that others may have.

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

/// Time that a process gets to answer another one that opens the device.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Time that a process waits for others that open it, one after the other.
pub(crate) const LONGEST: Duration = Duration::from_secs(30);

/// Time in which the port becomes free whose last process has just ended.
const LEAVING: Duration = Duration::from_millis(200);

/// Intervals of looking again, and of asking again.
pub(super) const PAUSE: Duration = Duration::from_millis(2);
const REMINDER: Duration = Duration::from_millis(20);

/// Bytes of socket buffer for requests.
const FRONT_BUFFER: usize = 512 << 10;

/// The right to open an address. Two processes at once would each take themselves for the first.
pub(crate) struct Opening {
    pub(super) addr: IpAddr,
    /// Its name is the right.
    _mailbox: OwnedFd,
}

impl Opening {
    /// Takes the right; `None` where another process has it. This one does not fork until it is given back.
    ///
    /// # Errors
    /// Those of making a socket.
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

/// A process that is opening an address: a socket that is connected to it, and to none that does so later.
pub(super) struct Opener(OwnedFd);

impl Opener {
    pub(super) fn of(addr: IpAddr) -> io::Result<Option<Self>> {
        let socket = new_mailbox()?;
        match connect(&socket, &name(addr, None)?) {
            Ok(()) => Ok(Some(Self(socket))),
            Err(Os::CONNREFUSED) => Ok(None),
            // It hears another one only: no process with this library does.
            Err(Os::PERM) => Err(unfinished()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether it has not finished.
    pub(super) fn is_opening(&self) -> bool {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = send(&self.0, &[Message::Probe as u8], flags);
        matches!(sent, Ok(_) | Err(Os::AGAIN))
    }
}

/// Waits until no process is opening an address. Many may do so one after the other, on a machine that is
/// busy: each has its time. `pause` waits and answers the time.
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

/// The address is in use by a process that is opening it.
fn unfinished() -> io::Error {
    in_use("a process has begun to open it and does not finish; it may be stopped")
}

/// The port is in use at the address, for a reason that helps to free it.
pub(super) fn in_use(why: &str) -> io::Error {
    let why = format!(
        "UDP port {ROCE_PORT} is in use: {why} (`ss -aunp 'sport = {ROCE_PORT}'` lists processes)"
    );
    io::Error::new(io::ErrorKind::AddrInUse, why)
}

/// Slots, by bits, from which no answer is expected: their processes are silent, or another user's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Silent(pub(super) u32);

/// Waits for the processes at an address, one of which may be stopped: until none is opening it, up to
/// `until`, and one that has it answers. Answers those that are silent, where all are. A process may fork
/// meanwhile, and its child keeps the mailbox with what waits there: so this asks for nothing that has
/// descriptors with it.
///
/// # Errors
/// `EADDRINUSE` where a process does not finish opening it, and those of making a socket.
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
            Inquired::Mail => match receive(&mailbox, &mut [0; 1]) {
                Some(Received::OfAnotherUser(Some(from))) => foreign.extend(inquiry.strike(&from)),
                Some(Received::Message {
                    from: Some(from), ..
                }) if inquiry.slot(&from).is_some() => return Ok(Silent::default()),
                _ => {}
            },
            Inquired::Vacant | Inquired::Silence(_) => {
                let asked = inquiry.asked.iter().map(|asked| asked.slot);
                let silent = asked.chain(foreign);
                return Ok(Silent(silent.fold(0, |bits, slot| bits | 1 << slot)));
            }
        }
    }
}

/// Questions to the processes of an address. They go to one more slot at a time: one answer is enough, but
/// a process that is stopped must not keep the others from being asked.
pub(super) struct Inquiry<'a> {
    mailbox: &'a OwnedFd,
    addr: IpAddr,
    /// [`Message::Ask`] or [`Message::Join`].
    question: Message,
    /// Slots that have not been asked.
    rest: VecDeque<u8>,
    /// Those with processes that have been, and have not answered.
    asked: Vec<Asked>,
    /// Those that were silent before.
    silent: Silent,
    start: Instant,
}

/// A slot that has been asked.
struct Asked {
    slot: u8,
    /// Where the sockets of the address come, if they are asked for.
    answers: Option<Answers>,
}

/// What comes of an [`Inquiry`] in the time of a [`REMINDER`].
pub(super) enum Inquired {
    /// The mailbox may have a message, or the answers.
    Mail,
    /// No slot has a process that could answer.
    Vacant,
    /// The process of this slot does not answer, nor do others.
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

    /// Time for the answers of those that have been asked. Where all were silent before, they are asked
    /// once more.
    fn patience(&self) -> Duration {
        let was_silent = |asked: &Asked| self.silent.0 >> asked.slot & 1 == 1;
        match self.asked.iter().all(was_silent) {
            true => REMINDER,
            false => PATIENCE,
        }
    }

    /// Asks, and waits for a moment.
    ///
    /// # Errors
    /// Those of sending.
    pub(super) fn poll(&mut self) -> io::Result<Inquired> {
        if self.rest.is_empty()
            && self.start.elapsed() >= self.patience()
            && let Some(asked) = self.asked.first()
        {
            return Ok(Inquired::Silence(asked.slot));
        }
        for Asked { slot, answers } in mem::take(&mut self.asked) {
            self.ask(slot, answers)?;
        }
        while let Some(slot) = self.rest.pop_front() {
            let joins = self.question == Message::Join;
            if self.ask(slot, joins.then(Answers::new).transpose()?)? {
                break;
            }
        }
        if self.asked.is_empty() {
            return Ok(Inquired::Vacant);
        }
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: REMINDER.subsec_nanos().into(),
        };
        let answers = self.asked.iter().filter_map(|asked| asked.answers.as_ref());
        let inputs = iter::once(self.mailbox).chain(answers.map(|answers| &answers.from));
        let mut inputs: Vec<_> = inputs.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        // A signal ends it early, and then there is no message.
        let _ = poll(&mut inputs, Some(&pause));
        Ok(Inquired::Mail)
    }

    /// Asks a slot; answers whether it has a process.
    fn ask(&mut self, slot: u8, answers: Option<Answers>) -> io::Result<bool> {
        let to = answers.as_ref().map(|answers| answers.to.as_fd());
        let name = name(self.addr, Some(slot))?;
        let is_there = is_there(self.mailbox, &name, self.question, to.as_slice())?;
        if is_there {
            self.asked.push(Asked { slot, answers });
        }
        Ok(is_there)
    }

    /// Asks the slot no longer that has an address; answers which.
    fn strike(&mut self, from: &SocketAddrUnix) -> Option<u8> {
        let slot = self.slot(from);
        self.asked.retain(|asked| Some(asked.slot) != slot);
        slot
    }

    /// The slot that has been asked and has an address.
    fn slot(&self, from: &SocketAddrUnix) -> Option<u8> {
        let mut asked = self.asked.iter().map(|asked| asked.slot);
        asked.find(|slot| name(self.addr, Some(*slot)).is_ok_and(|name| name == *from))
    }
}

/// What the processes of an address give another one.
pub(super) enum Joined {
    /// The sockets and the table.
    Welcome(Vec<OwnedFd>, OwnedFd),
    /// Nothing. Where the port is in use, this is why.
    Nothing { why: String },
}

/// Why an address is in use.
const NO_LIBRARY: &str = "a process without this library has it, such as riserd, or one as a further \
                          address of its device, or the kernel for rdma_rxe, at all addresses";
pub(super) const OTHER_VERSION: &str = "a process with another version of this library has it";
const OTHER_USER: &str = "a process of another user has it";

/// A pair of sockets for the answer of one process. Who has taken the name of its slot gets an end of it as
/// well: that is connected for good, and no other process answers there.
pub(super) struct Answers {
    /// The process that is asked gets it.
    pub(super) to: OwnedFd,
    pub(super) from: OwnedFd,
}

impl Answers {
    pub(super) fn new() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (to, from) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        sockopt::set_socket_passcred(&from, true)?;
        Ok(Self { to, from })
    }
}

/// Asks the processes of an address for the sockets and the table, for the one of a slot.
///
/// # Errors
/// `EMFILE` where this process may not have that many descriptors.
pub(super) fn join(
    mailbox: &OwnedFd,
    addr: IpAddr,
    slot: u8,
    silent: Silent,
) -> io::Result<Joined> {
    let mut inquiry = Inquiry::new(mailbox, addr, Message::Join, silent);
    inquiry.rest.retain(|other| *other != slot);
    let mut buffer = [0; MESSAGE];
    // Names may be another user's, who answers as well: whether the port is free is for the kernel to say.
    let mut refusal = None;
    let silent = loop {
        match inquiry.poll()? {
            Inquired::Mail => {}
            Inquired::Vacant => break None,
            Inquired::Silence(slot) => {
                warn!(%addr, slot, "a process with this address does not answer");
                break Some(slot);
            }
        }
        // Others that are no such process may write as well.
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
                // It is closed, or no process with this library has written.
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
            // The kernel has left out those for which there was no room.
            return Err(Os::MFILE.into());
        }
        if let Some(table) = all.pop() {
            return Ok(Joined::Welcome(all, table));
        }
    };
    let why = match (refusal, silent) {
        (Some(why), _) => why.into(),
        (None, Some(slot)) => {
            format!("the process in slot {slot}, which has it, does not answer; it may be stopped")
        }
        (None, None) => NO_LIBRARY.into(),
    };
    Ok(Joined::Nothing { why })
}

/// Makes the sockets and the table.
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
