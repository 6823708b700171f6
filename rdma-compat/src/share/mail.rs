//! Messages between processes of an address.

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

/// Maximum size of a message with a packet.
pub(super) const MESSAGE: usize = 8 << 10;

/// Maximum number of descriptors that the kernel allows in a message.
pub(super) const MAX_DESCRIPTORS: usize = 253;

/// Maximum number of threads that close descriptors of other users.
const MAX_DISCARDING: usize = 64;

/// Number of these threads.
static DISCARDING: AtomicUsize = AtomicUsize::new(0);

/// Time after which such a thread should have received its message.
const TAKEN: Duration = Duration::from_millis(20);

/// The type of a message between processes of an address. It is stored in the first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Message {
    /// Requests the sockets and the table, and contains the socket for the response.
    Join = 1,
    /// Contains the sockets and the table. It is not sent to a name, which might already be used by
    /// another user.
    Welcome = 2,
    /// The address belongs to another user.
    Refusal = 3,
    /// A packet that was received by the wrong process, preceded by its source address.
    Packet = 4,
    /// Empty message that wakes the process, if it exists.
    Probe = 5,
    /// Requests [`Message::Here`].
    Ask = 6,
    /// Indicates that the process is responding.
    Here = 7,
}

/// Returns the name of a slot, or the name that grants the right to open the address.
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

/// Sends a message with descriptors to a name. Returns whether it is used by a process, even if
/// this process exits before it can respond, or if its mailbox is full.
///
/// # Errors
/// Returns errors of sending.
pub(super) fn is_there(
    mailbox: &OwnedFd,
    to: &SocketAddrUnix,
    message: Message,
    with: &[BorrowedFd<'_>],
) -> io::Result<bool> {
    match send_with(mailbox, Some(to), message, with) {
        // A socket that is connected to a different socket, and only receives from it, exists too.
        Ok(()) | Err(Os::AGAIN | Os::PERM) => Ok(true),
        Err(Os::CONNREFUSED) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Result of receiving from a mailbox.
pub(super) enum Received {
    /// A message of `len` bytes, including its type.
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

/// Receives a message with its descriptors. Returns `None` if the mailbox is empty. Descriptors
/// from other users are closed by another thread.
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
                // The sender may have configured the descriptor to block when it is closed. Most
                // descriptors don't support this option.
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

/// Returns the sender of the next message, without removing the message and its descriptors from
/// the mailbox.
fn peek(mailbox: &OwnedFd) -> Option<Sender> {
    // There is no space for descriptors, but the kernel reports whether there are any.
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

/// Receives the next message without space for its descriptors, so that they are closed by the
/// kernel. The sender can make this block for any time, for example by using a file of a FUSE file
/// system.
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

/// Same as [`discard`], in a separate thread.
///
/// # Errors
/// Fails if there are already [`MAX_DISCARDING`] such threads, or if a thread can't be started.
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
        // The kernel removes the message from the mailbox before it closes the descriptors.
        Ok(()) => drop(is_done.recv_timeout(TAKEN)),
        Err(error) => {
            DISCARDING.fetch_sub(1, Ordering::Relaxed);
            warn!(%error, "cannot start a thread that closes received descriptors: the device may block");
        }
    }
    begun
}

/// Responds to a message. If the mailbox of the other process is full, the response is dropped.
pub(super) fn reply(mailbox: &OwnedFd, to: Option<&SocketAddrUnix>, kind: Message) {
    if let Some(to) = to
        && let Err(error) = send_with(mailbox, Some(to), kind, &[])
    {
        debug!(%error, "cannot reply to a process");
    }
}

/// Sends a message with descriptors, but without a body, to a name or to the connected socket.
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
