//! Work requests and completions.

use std::time::Duration;

use bitflags::bitflags;

use super::{Access, AhId, LKey, MrId, MwBind, NetworkHeader, QKey, QpId, RKey, WrId};

/// One segment of local memory in a scatter list. Laid out as `ibv_sge`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Virtual address (or offset, for a zero-based region) of the first byte.
    pub addr: u64,
    /// Length of the piece in bytes.
    pub length: u32,
    /// Key of the region that the segment lies in.
    pub lkey: LKey,
}

/// A range of the peer's memory: where it starts. The scatter list gives the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddr {
    /// Address in the peer's region.
    pub addr: u64,
    /// The peer's key for it.
    pub rkey: RKey,
}

/// Operation of a send request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// Send the scatter list to the peer's next receive.
    Send,
    /// Send, with four bytes of immediate data.
    ///
    /// No user yet.
    SendImm(u32),
    /// Send, and invalidate a key of the peer's.
    SendInv(RKey),
    /// Write the scatter list into the peer's memory.
    Write(RemoteAddr),
    /// Write, and consume a receive of the peer's for the immediate data.
    ///
    /// No user yet.
    WriteImm(RemoteAddr, u32),
    /// Read the peer's memory into the scatter list.
    Read(RemoteAddr),
    /// Compare eight bytes of the peer's memory and swap them if equal; the old value comes back.
    ///
    /// No user yet.
    CmpSwap {
        /// The eight bytes, aligned to eight.
        remote: RemoteAddr,
        /// Value to compare with.
        compare: u64,
        /// Value to store if equal.
        swap: u64,
    },
    /// Add to eight bytes of the peer's memory; the old value comes back.
    ///
    /// No user yet.
    FetchAdd {
        /// The eight bytes, aligned to eight.
        remote: RemoteAddr,
        /// Addend; the sum wraps.
        add: u64,
    },
    /// Make a fast-registration region valid with what was mapped onto it.
    RegMr {
        /// Region to be registered.
        mr: MrId,
        /// Its key from now on: the index of its present key with another low byte.
        key: RKey,
        /// Access rights of the new key.
        access: Access,
    },
    /// Bind a memory window. It starts after the requests before it have started, and what comes
    /// after it finds the window bound; with [`SendFlags::FENCE`] it waits for READs and atomics.
    ///
    /// No user yet.
    BindMw(MwBind),
    /// Make a key of our own invalid. It waits for earlier requests of the queue whose scatter lists
    /// name the key, and with [`SendFlags::FENCE`] for all earlier ones.
    LocalInv(RKey),
}

impl SendOp {
    /// The opcode in the completion of such a request.
    #[must_use]
    pub fn wc_opcode(&self) -> WcOpcode {
        match self {
            Self::Send | Self::SendImm(_) | Self::SendInv(_) => WcOpcode::Send,
            Self::Write(_) | Self::WriteImm(..) => WcOpcode::Write,
            Self::Read(_) => WcOpcode::Read,
            Self::CmpSwap { .. } => WcOpcode::CmpSwap,
            Self::FetchAdd { .. } => WcOpcode::FetchAdd,
            Self::RegMr { .. } => WcOpcode::RegMr,
            Self::BindMw(_) => WcOpcode::BindMw,
            Self::LocalInv(_) => WcOpcode::LocalInv,
        }
    }
}

bitflags! {
    /// Flags of a send request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct SendFlags: u8 {
        /// Completes visibly. Without it only an error does.
        const SIGNALED = 1;
        /// The receiver's completion counts for a solicited notification.
        const SOLICITED = 2;
        /// Starts only after all earlier READs and atomics of the queue have completed.
        const FENCE = 4;
    }
}

/// Destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdDest {
    /// Path to the receiver.
    pub ah: AhId,
    /// The queue pair there.
    pub qpn: u32,
    /// The queue key that it expects.
    pub qkey: QKey,
}

/// A request for a send queue.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Comes back in the completion.
    pub wr_id: WrId,
    /// Operation with its arguments.
    pub op: SendOp,
    /// Local memory: the source of sends and writes, the destination of reads and atomics. Keys
    /// and ranges are checked when the request is carried out: a bad one ends it with
    /// [`WcStatus::LocProtErr`] in its turn, not at the post (IBTA 10.7.3.2).
    pub sges: &'a [Sge],
    /// The data of a send or write in place of a scatter list, which is then empty. It is copied at
    /// the post and needs no key; at most [`QpCap::max_inline`](super::QpCap::max_inline) bytes.
    pub inline: Option<&'a [u8]>,
    /// Flags of the operation.
    pub flags: SendFlags,
    /// The destination, on datagram queue pairs only.
    pub ud: Option<UdDest>,
    /// Number of the peer's shared receive queue, of 24 bits; needed on
    /// [`QpType::XrcIni`](super::QpType::XrcIni), and ignored on others.
    pub remote_srqn: Option<u32>,
}

impl<'a> SendWr<'a> {
    /// Makes a signaled request.
    #[must_use]
    pub fn new(wr_id: u64, op: SendOp, sges: &'a [Sge]) -> Self {
        Self {
            wr_id: WrId(wr_id),
            op,
            sges,
            inline: None,
            flags: SendFlags::SIGNALED,
            ud: None,
            remote_srqn: None,
        }
    }

    /// Makes a signaled request that carries its data.
    ///
    /// No user yet.
    #[must_use]
    pub fn with_inline(wr_id: u64, op: SendOp, data: &'a [u8]) -> Self {
        Self {
            inline: Some(data),
            ..Self::new(wr_id, op, &[])
        }
    }

    /// The same request with other flags.
    #[must_use]
    pub fn flags(self, flags: SendFlags) -> Self {
        Self { flags, ..self }
    }
}

/// A request for a receive queue.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// Comes back in the completion.
    pub wr_id: WrId,
    /// Memory for the message, whose length bounds the message. On datagram queue pairs the
    /// first 40 bytes are the global route header's place. As for sends, a bad key ends the
    /// receive with [`WcStatus::LocProtErr`] when a message needs it, not at the post.
    pub sges: &'a [Sge],
}

/// Kind of request that a completion ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WcOpcode {
    /// A send of any kind.
    Send,
    /// An RDMA WRITE, with or without immediate.
    Write,
    /// An RDMA READ request.
    Read,
    /// An atomic compare-and-swap request.
    CmpSwap,
    /// An atomic fetch-and-add request.
    FetchAdd,
    /// A fast registration request.
    RegMr,
    /// A request that binds a memory window.
    BindMw,
    /// A local invalidation request.
    LocalInv,
    /// A receive, ended by a send.
    Recv,
    /// A receive, consumed by a WRITE with immediate.
    RecvWriteImm,
}

impl WcOpcode {
    /// Whether the request stood in a receive queue.
    #[must_use]
    pub fn is_recv(self) -> bool {
        matches!(self, Self::Recv | Self::RecvWriteImm)
    }
}

/// Status of a completed request (IBTA 11.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WcStatus {
    /// The request has succeeded.
    Success,
    /// The message is longer than the receive, or than a message may be.
    LocLenErr,
    /// The request was inconsistent in a way that only its execution could show.
    LocQpOpErr,
    /// A local key did not allow the access.
    LocProtErr,
    /// Flushed in the error state.
    WrFlushErr,
    /// A memory-window or registration request failed.
    MwBindErr,
    /// The response does not fit the request.
    BadRespErr,
    /// A local key failed while receiving a WRITE with immediate.
    LocAccessErr,
    /// The peer refused the request as invalid. For a receive: the rest of its message did not come.
    RemInvReqErr,
    /// The peer's key, right or range did not allow the access.
    RemAccessErr,
    /// The peer could not complete the request.
    RemOpErr,
    /// The transport's retries are exhausted.
    RetryExcErr,
    /// The peer stayed not ready for longer than the RNR retries.
    RnrRetryExcErr,
    /// The work was aborted by the peer's reset of a shared queue.
    RemAbortErr,
    /// Any other error of the provider.
    FatalErr,
}

impl WcStatus {
    /// Whether the request succeeded.
    #[must_use]
    pub fn is_ok(self) -> bool {
        self == Self::Success
    }
}

/// The end of a work request.
///
/// With a status other than success only `wr_id`, `status`, `opcode`, `qp`, `qp_num` and
/// `vendor_err` are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The request's own value.
    pub wr_id: WrId,
    /// Status of the request.
    pub status: WcStatus,
    /// Kind of the request.
    pub opcode: WcOpcode,
    /// The queue pair it was posted to; for a shared receive queue, the one it was used by. It may
    /// have been destroyed since, and then the handle names none.
    pub qp: QpId,
    /// Its number on the wire, which stays known after it was destroyed.
    pub qp_num: u32,
    /// Bytes received or read; includes the 40 bytes of route header on a datagram receive.
    pub byte_len: u32,
    /// Immediate data, where the peer sent any.
    pub imm: Option<u32>,
    /// The key of ours that the peer's send invalidated.
    pub invalidated: Option<RKey>,
    /// The sender's queue pair number, on datagram receives.
    pub src_qp: u32,
    /// It counts for a solicited notification.
    pub solicited: bool,
    /// Kind of the route header before a datagram; `None` where there is none, as with connections.
    pub network: Option<NetworkHeader>,
    /// The provider's own detail of an error; 0 if none.
    pub vendor_err: u32,
}

impl Completion {
    /// The end of a request that has received nothing.
    #[must_use]
    pub const fn new(
        wr_id: WrId,
        status: WcStatus,
        opcode: WcOpcode,
        qp: QpId,
        qp_num: u32,
    ) -> Self {
        Self {
            wr_id,
            status,
            opcode,
            qp,
            qp_num,
            byte_len: 0,
            imm: None,
            invalidated: None,
            src_qp: 0,
            solicited: false,
            network: None,
            vendor_err: 0,
        }
    }
}

/// A completion, and when it came into its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedCompletion {
    /// The completion itself.
    pub completion: Completion,
    /// Time by the device's clock, in nanoseconds.
    pub device_time: u64,
    /// Time since the Unix epoch, by the system's clock as it was when the device was opened.
    pub wall_time: Duration,
}

/// For which completions an armed queue fires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// The next completion of any kind.
    Next,
    /// The next solicited or failed one.
    ///
    /// No user yet.
    Solicited,
    /// The completion by which this many have been added.
    ///
    /// No user yet.
    Count(u32),
}
