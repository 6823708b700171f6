//! Messages between the processes of an address.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use rustix::io::Errno as Os;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    recvmsg, sendmsg, sendmsg_addr, socket_with, sockopt,
};
use rustix::process::Uid;
use tracing::{debug, warn};

use crate::thread;

/// Room for a message with the longest packet.
pub(super) const MESSAGE: usize = 8 << 10;

/// Most descriptors that a message may have with it, by the kernel.
pub(super) const MAX_DESCRIPTORS: usize = 253;

/// Threads at most that close descriptors of other users.
const MAX_DISCARDING: usize = 64;

/// Number of these threads.
static DISCARDING: AtomicUsize = AtomicUsize::new(0);

/// Time after which such a thread has received its message.
const TAKEN: Duration = Duration::from_millis(20);

/// A message between processes of an address: its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Message {
    /// Asks for the sockets and the table, with the socket that they are to go to.
    Join = 1,
    /// They come with it. It goes to no name, which may be another user's by now.
    Welcome = 2,
    /// The address is another user's.
    Refusal = 3,
    /// A packet that has come to the wrong process, behind its source.
    Packet = 4,
    /// Nothing, but it wakes the process, if there is one.
    Probe = 5,
    /// Asks for [`Message::Here`].
    Ask = 6,
    /// The process answers, and gives nothing.
    Here = 7,
}

/// The name of a slot, or that of the right to open the address.
pub(super) fn name(addr: IpAddr, slot: Option<u8>) -> Result<SocketAddrUnix, Os> {
    let name = match slot {
        Some(slot) => format!("riser-{addr}-{slot}"),
        None => format!("riser-{addr}"),
    };
    SocketAddrUnix::new_abstract_name(name.as_bytes())
}

pub(super) fn new_sender() -> Result<OwnedFd, Os> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
}

pub(super) fn new_mailbox() -> io::Result<OwnedFd> {
    let mailbox = new_sender()?;
    // The kernel reports the sender.
    sockopt::set_socket_passcred(&mailbox, true)?;
    Ok(mailbox)
}

/// Sends a message to a name, with descriptors; answers whether a process has it. It may have ended before it
/// could answer, or have a full mailbox.
///
/// # Errors
/// Those of sending.
pub(super) fn is_there(
    mailbox: &OwnedFd,
    to: &SocketAddrUnix,
    message: Message,
    with: &[BorrowedFd<'_>],
) -> io::Result<bool> {
    match send_with(mailbox, Some(to), message, with) {
        // One that is connected to another, and hears that one only, is there as well.
        Ok(()) | Err(Os::AGAIN | Os::PERM) => Ok(true),
        Err(Os::CONNREFUSED) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// What a mailbox got.
pub(super) enum Received {
    /// `len` bytes, the kind of message with them.
    Message {
        kind: u8,
        len: usize,
        from: Option<SocketAddrUnix>,
    },
    OfAnotherUser(Option<SocketAddrUnix>),
    /// An empty message.
    Nothing,
}

pub(super) fn receive(mailbox: &OwnedFd, buffer: &mut [u8]) -> Option<Received> {
    receive_with(mailbox, buffer, &mut Vec::new())
}

/// Receives a message, and the descriptors that come with it; `None` where there is none. Those of
/// another user are closed by another thread.
pub(super) fn receive_with(
    mailbox: &OwnedFd,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Option<Received> {
    let sender = peek(mailbox)?;
    if sender.user != Some(rustix::process::geteuid()) {
        discard(mailbox, sender.has_descriptors);
        return Some(Received::OfAnotherUser(sender.name));
    }
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS), ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(mailbox, &mut [IoSliceMut::new(buffer)], &mut control, flags).ok()?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            descriptors.extend(fds.inspect(|fd| {
                // Who has sent it may have it wait at its close. Most have no such option.
                let _ = sockopt::set_socket_linger(fd, None);
            }));
        }
    }
    let from = got.address.and_then(|a| SocketAddrUnix::try_from(a).ok());
    Some(match got.bytes {
        0 => Received::Nothing,
        len => Received::Message {
            kind: buffer[0],
            len,
            from,
        },
    })
}

/// Sender of a message.
struct Sender {
    user: Option<Uid>,
    name: Option<SocketAddrUnix>,
    has_descriptors: bool,
}

/// The sender of the next message, which stays in the mailbox with its descriptors.
fn peek(mailbox: &OwnedFd) -> Option<Sender> {
    // Without room for descriptors: the kernel reports that there are some.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let got = recvmsg(mailbox, &mut [], &mut control, flags).ok()?;
    let user = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmCredentials(who) => Some(who.uid),
        _ => None,
    });
    Some(Sender {
        user,
        name: got.address.and_then(|a| SocketAddrUnix::try_from(a).ok()),
        has_descriptors: got.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Receives the next message without room for its descriptors, which the kernel then closes. That
/// takes as long as their sender wants, for example with a file of a FUSE file system.
fn discard(mailbox: &OwnedFd, has_descriptors: bool) {
    if has_descriptors && discard_in_thread(mailbox).is_ok() {
        return;
    }
    let _ = recvmsg(
        mailbox,
        &mut [],
        &mut RecvAncillaryBuffer::default(),
        RecvFlags::DONTWAIT,
    );
}

/// As [`discard`], in a thread of its own.
///
/// # Errors
/// There are [`MAX_DISCARDING`] such threads, or the system makes none.
fn discard_in_thread(mailbox: &OwnedFd) -> io::Result<()> {
    let mailbox = mailbox.try_clone()?;
    let count = DISCARDING.fetch_add(1, Ordering::Relaxed);
    let (done, is_done) = mpsc::channel();
    let begun = match count < MAX_DISCARDING {
        true => thread::spawn("riser-discard".into(), move || {
            discard(&mailbox, false);
            DISCARDING.fetch_sub(1, Ordering::Relaxed);
            let _ = done.send(());
        }),
        false => Err(io::ErrorKind::ResourceBusy.into()),
    };
    match &begun {
        // The kernel takes the message out of the mailbox before it closes the descriptors.
        Ok(()) => drop(is_done.recv_timeout(TAKEN)),
        Err(error) => {
            DISCARDING.fetch_sub(1, Ordering::Relaxed);
            warn!(%error, "closing descriptors of another user may stop the device");
        }
    }
    begun
}

/// Answers a message. A process that does not read its answer does not get it.
pub(super) fn reply(mailbox: &OwnedFd, to: Option<&SocketAddrUnix>, kind: Message) {
    if let Some(to) = to
        && let Err(error) = send_with(mailbox, Some(to), kind, &[])
    {
        debug!(%error, "cannot answer a process");
    }
}

/// Sends a message without a body, but with descriptors, to a name or to what the socket is connected to.
pub(super) fn send_with(
    socket: &OwnedFd,
    to: Option<&SocketAddrUnix>,
    kind: Message,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Os> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let bytes = [kind as u8];
    let parts = [IoSlice::new(&bytes)];
    let sent = match to {
        Some(to) => sendmsg_addr(socket, to, &parts, &mut control, flags),
        None => sendmsg(socket, &parts, &mut control, flags),
    };
    sent.map(drop)
}
