//! Options of sockets, and their defaults.

use std::ffi::c_int;
use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

use super::stream::{LOW_WATER, Sizes};
use super::wire::supported_iomaps;

/// Folder with a file for each default, as rdma-core has it.
const FOLDER: &str = "/etc/rdma/rsocket";

/// Least and most work requests of a queue. Sequence numbers have 16 bits.
const QUEUE: (u32, u32) = (16, 0xfffe);

/// Most bytes of a buffer: a message counts a half in 29 bits, and few programs mean more.
const MAX_BUFFER: u32 = 1 << 28;

/// Most bytes that are sent inline.
const MAX_INLINE: u32 = 1024;

/// Level of the options that sockets do not have.
pub(super) const SOL_RDMA: c_int = 0x10000;

/// Work requests of the send queue.
pub(super) const RDMA_SQSIZE: c_int = 0;
/// Work requests of the receive queue.
pub(super) const RDMA_RQSIZE: c_int = 1;
/// Most bytes that are sent inline.
pub(super) const RDMA_INLINE: c_int = 2;
/// Iomaps of the other end's.
pub(super) const RDMA_IOMAPSIZE: c_int = 3;

/// Seconds after which an idle connection is tried, where the program gives none.
const KEEP_ALIVE: &str = "/proc/sys/net/ipv4/tcp_keepalive_time";

/// Defaults of this machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Defaults {
    sizes: [u32; 6],
    /// Time for which a thread polls before it sleeps.
    pub(super) polling: Duration,
}

impl Defaults {
    /// Those of the folder's files, and rdma-core's where there are none.
    pub(super) fn get() -> Self {
        static DEFAULTS: OnceLock<Defaults> = OnceLock::new();
        *DEFAULTS.get_or_init(|| {
            let file = |name: &str, default| number(&Path::new(FOLDER).join(name), default);
            Self {
                sizes: [
                    file("sqsize_default", 384),
                    file("rqsize_default", 384),
                    file("inline_default", 64),
                    file("wmem_default", 1 << 17),
                    file("mem_default", 1 << 17),
                    file("iomap_size", 0),
                ],
                polling: Duration::from_micros(file("polling_time", 10).into()),
            }
        })
    }
}

/// The number in a file, or a default.
fn number<T: FromStr>(path: &Path, default: T) -> T {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().parse().unwrap_or(default)
}

/// Options of a socket.
#[derive(Clone, Debug)]
pub(super) struct Options {
    send_queue: u32,
    recv_queue: u32,
    inline: u32,
    send_buffer: u32,
    recv_buffer: u32,
    iomaps: u32,
    /// `SO_REUSEADDR`
    pub(super) reuses_address: bool,
    /// `SO_OOBINLINE`
    pub(super) oob_inline: bool,
    /// `SO_LINGER`: a socket lingers until its data have arrived.
    pub(super) lingers: bool,
    /// `TCP_NODELAY`, which is always so.
    pub(super) no_delay: bool,
    /// `IPV6_V6ONLY`
    pub(super) v6_only: bool,
    /// `SO_KEEPALIVE`
    pub(super) keeps_alive: bool,
    /// `TCP_KEEPIDLE`, in seconds.
    pub(super) keep_idle: u32,
}

impl Options {
    /// Options of a new socket.
    pub(super) fn new(defaults: &Defaults) -> Self {
        let [
            send_queue,
            recv_queue,
            inline,
            send_buffer,
            recv_buffer,
            iomaps,
        ] = defaults.sizes;
        let mut options = Self {
            send_queue: 0,
            recv_queue: 0,
            inline: 0,
            send_buffer: 0,
            recv_buffer: 0,
            iomaps: 0,
            reuses_address: false,
            oob_inline: false,
            lingers: true,
            no_delay: false,
            v6_only: false,
            keeps_alive: false,
            keep_idle: number(Path::new(KEEP_ALIVE), 7200),
        };
        options.set_send_queue(send_queue);
        options.set_recv_queue(recv_queue);
        options.set_inline(inline);
        options.set_send_buffer(send_buffer);
        options.set_recv_buffer(recv_buffer);
        options.set_iomaps(iomaps);
        options
    }

    /// Those of a listener's connection: the sizes.
    pub(super) fn inherited(&self) -> Self {
        Self {
            reuses_address: false,
            oob_inline: false,
            lingers: true,
            no_delay: false,
            v6_only: false,
            keeps_alive: false,
            ..self.clone()
        }
    }

    pub(super) fn set_send_queue(&mut self, n: u32) {
        self.send_queue = n.clamp(QUEUE.0, QUEUE.1);
    }

    pub(super) fn set_recv_queue(&mut self, n: u32) {
        self.recv_queue = n.clamp(QUEUE.0, QUEUE.1);
    }

    pub(super) fn set_inline(&mut self, bytes: u32) {
        self.inline = bytes.min(MAX_INLINE);
    }

    pub(super) fn set_send_buffer(&mut self, bytes: u32) {
        self.send_buffer = bytes.clamp(2 * LOW_WATER, MAX_BUFFER);
    }

    pub(super) fn set_recv_buffer(&mut self, bytes: u32) {
        // Two halves of the same size.
        self.recv_buffer = bytes.clamp(2, MAX_BUFFER) & !1;
    }

    pub(super) fn set_iomaps(&mut self, n: u32) {
        self.iomaps = supported_iomaps(n).into();
    }

    /// Sizes of a connection.
    pub(super) fn sizes(&self) -> Sizes {
        Sizes {
            send_queue: self.send_queue as u16,
            recv_queue: self.recv_queue as u16,
            inline: self.inline,
            send_buffer: self.send_buffer,
            recv_buffer: self.recv_buffer,
            iomaps: self.iomaps as u16,
        }
    }
}
