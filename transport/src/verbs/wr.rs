//! Work requests and completions.

use std::time::Duration;

use bitflags::bitflags;

use super::{Access, AhId, LKey, MrId, MwBind, NetworkHeader, QKey, QpId, RKey, WrId};

/// Scatter list entry for local memory. Uses the same layout as `ibv_sge`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Virtual address of the first byte, or offset in a zero-based region.
    pub addr: u64,
    /// Size in bytes.
    pub length: u32,
    /// Region key.
    pub lkey: LKey,
}

/// Start address of a range in the peer's memory. The size is determined by the scatter list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddr {
    /// Address in the peer's region.
    pub addr: u64,
    /// Region key of the peer.
    pub rkey: RKey,
}

/// Send request operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// Sends the data in the scatter list to the peer's next receive.
    Send,
    /// Send with four bytes of immediate data.
    ///
    /// Currently not used.
    SendImm(u32),
    /// Send, and invalidate a key of the peer.
    SendInv(RKey),
    /// Writes the data in the scatter list to the peer's memory.
    Write(RemoteAddr),
    /// Write, and consume a receive of the peer for the immediate data.
    ///
    /// Currently not used.
    WriteImm(RemoteAddr, u32),
    /// Reads the peer's memory into the scatter list.
    Read(RemoteAddr),
    /// Compares eight bytes of the peer's memory and swaps them if equal. Returns the original
    /// value.
    ///
    /// Currently not used.
    CmpSwap {
        /// Remote address, which must be aligned to eight bytes.
        remote: RemoteAddr,
        /// Value to compare with.
        compare: u64,
        /// Value to store if equal.
        swap: u64,
    },
    /// Adds to eight bytes of the peer's memory. Returns the original value.
    ///
    /// Currently not used.
    FetchAdd {
        /// Remote address, which must be aligned to eight bytes.
        remote: RemoteAddr,
        /// Value to add. The result can wrap.
        add: u64,
    },
    /// Registers the mapped memory of a fast-registration region or integrity region.
    RegMr {
        /// Region to register.
        mr: MrId,
        /// New key: the index of the current key with a different low byte.
        key: RKey,
        /// Access rights for the new key.
        access: Access,
    },
    /// Binds a memory window. This is executed when all previous requests have been started and
    /// before the following requests. With [`SendFlags::FENCE`], it also waits for READs and
    /// atomics.
    ///
    /// Currently not used.
    BindMw(MwBind),
    /// Invalidates a local key. This waits for previous requests in the queue if their scatter
    /// lists use this key. With [`SendFlags::FENCE`], it waits for all previous requests.
    LocalInv(RKey),
}

impl SendOp {
    /// Returns true for a local operation, which doesn't send any packets.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(
            self,
            Self::RegMr { .. } | Self::BindMw(_) | Self::LocalInv(_)
        )
    }

    /// Returns the opcode used in the completion.
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
    /// Send request flags.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct SendFlags: u8 {
        /// Generates a completion. If not set, there is only a completion on error.
        const SIGNALED = 1;
        /// The receiver's completion triggers a solicited notification.
        const SOLICITED = 2;
        /// Only start this request when all previous READs and atomics in the queue are complete.
        const FENCE = 4;
    }
}

/// Destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdDest {
    /// Address handle for the receiver.
    pub ah: AhId,
    /// The receiver's queue pair number.
    pub qpn: u32,
    /// Q_Key expected by the receiver.
    pub qkey: QKey,
}

/// Send work request.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Returned in the completion.
    pub wr_id: WrId,
    /// Operation with its parameters.
    pub op: SendOp,
    /// Local memory: source for sends and writes, destination for reads and atomics. Keys and
    /// ranges are checked when the request is executed, and not when it is posted. If they are
    /// invalid, it completes with [`WcStatus::LocProtErr`] (IBTA 10.7.3.2).
    pub sges: &'a [Sge],
    /// Data for a send or write to be used instead of a scatter list, which must be empty. The data
    /// is copied when posted and doesn't need a key. The maximum size is
    /// [`QpCap::max_inline`](super::QpCap::max_inline) bytes.
    pub inline: Option<&'a [u8]>,
    /// Operation flags.
    pub flags: SendFlags,
    /// Destination, only used for datagram queue pairs.
    pub ud: Option<UdDest>,
    /// Number of the peer's shared receive queue, 24 bits. Required for
    /// [`QpType::XrcIni`](super::QpType::XrcIni), otherwise ignored.
    pub remote_srqn: Option<u32>,
}

impl<'a> SendWr<'a> {
    /// Creates a signaled request.
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

    /// Creates a signaled request with inline data.
    ///
    /// Currently not used.
    #[must_use]
    pub fn with_inline(wr_id: u64, op: SendOp, data: &'a [u8]) -> Self {
        Self {
            inline: Some(data),
            ..Self::new(wr_id, op, &[])
        }
    }

    /// Sets the flags.
    #[must_use]
    pub fn flags(self, flags: SendFlags) -> Self {
        Self { flags, ..self }
    }
}

/// Receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// Returned in the completion.
    pub wr_id: WrId,
    /// Memory for the message, which also limits the message size. For datagram queue pairs, the
    /// first 40 bytes are used for the global route header. As for sends, keys are checked when a
    /// message is received, and not when posted. If invalid, the receive completes with
    /// [`WcStatus::LocProtErr`].
    pub sges: &'a [Sge],
}

/// Type of the completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WcOpcode {
    /// Any type of send.
    Send,
    /// RDMA WRITE, with or without immediate data.
    Write,
    /// RDMA READ request.
    Read,
    /// Atomic compare-and-swap request.
    CmpSwap,
    /// Atomic fetch-and-add request.
    FetchAdd,
    /// Fast registration.
    RegMr,
    /// Memory window bind.
    BindMw,
    /// Local invalidation.
    LocalInv,
    /// Receive completed by a send.
    Recv,
    /// Receive consumed by a WRITE with immediate data.
    RecvWriteImm,
}

impl WcOpcode {
    /// Returns whether the request was posted to a receive queue.
    #[must_use]
    pub fn is_recv(self) -> bool {
        matches!(self, Self::Recv | Self::RecvWriteImm)
    }
}

/// Work completion status (IBTA 11.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WcStatus {
    /// The request succeeded.
    Success,
    /// The message exceeds the receive size or the maximum message size.
    LocLenErr,
    /// The request was inconsistent, which could only be detected when executing it.
    LocQpOpErr,
    /// A local key does not allow this access.
    LocProtErr,
    /// Flushed because of the error state.
    WrFlushErr,
    /// A memory window bind or registration has failed.
    MwBindErr,
    /// The response does not match the request.
    BadRespErr,
    /// A local key was invalid when receiving a WRITE with immediate data.
    LocAccessErr,
    /// The peer rejected the request as invalid. For a receive: the message was not received
    /// completely.
    RemInvReqErr,
    /// A key, access right or range was rejected by the peer.
    RemAccessErr,
    /// The peer could not complete the request.
    RemOpErr,
    /// The transport retry count was exceeded.
    RetryExcErr,
    /// The RNR retry count was exceeded because the peer was not ready.
    RnrRetryExcErr,
    /// The operation was aborted by the peer because a shared queue was reset.
    RemAbortErr,
    /// Any other provider error.
    FatalErr,
}

impl WcStatus {
    /// Returns true if the request succeeded.
    #[must_use]
    pub fn is_ok(self) -> bool {
        self == Self::Success
    }
}

/// Work completion.
///
/// If the status is not success, only `wr_id`, `status`, `opcode`, `qp`, `qp_num` and `vendor_err`
/// are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Work request ID.
    pub wr_id: WrId,
    /// Completion status.
    pub status: WcStatus,
    /// Request type.
    pub opcode: WcOpcode,
    /// Queue pair the request was posted to, or the queue pair that has used a shared receive. The
    /// handle is invalid if the queue pair has been destroyed.
    pub qp: QpId,
    /// Queue pair number, which is also valid if the queue pair has been destroyed.
    pub qp_num: u32,
    /// Number of bytes received or read. This includes the 40-byte route header for a datagram.
    pub byte_len: u32,
    /// Immediate data, if sent by the peer.
    pub imm: Option<u32>,
    /// Local key invalidated by the peer.
    pub invalidated: Option<RKey>,
    /// The sender's queue pair number, for datagram receives.
    pub src_qp: u32,
    /// Set if this triggers a solicited notification.
    pub solicited: bool,
    /// Type of the route header in a received datagram, or `None` if there is no header, as for
    /// connections.
    pub network: Option<NetworkHeader>,
    /// Provider-specific error code, or 0.
    pub vendor_err: u32,
}

impl Completion {
    /// Creates a completion for a request without received data.
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

/// Completion with timestamps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedCompletion {
    /// Completion.
    pub completion: Completion,
    /// Time based on the device clock, in nanoseconds.
    pub device_time: u64,
    /// Time since the Unix epoch, based on the system clock when the device was opened.
    pub wall_time: Duration,
}

/// Completions that trigger an armed queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// Next completion of any type.
    Next,
    /// Next completion that is solicited or has failed.
    ///
    /// Currently not used.
    Solicited,
    /// Completion after which this number has been added, from 1 to the size of the queue
    /// ([`CqAttr::entries`](super::CqAttr::entries)). If the queue is made smaller, the remaining
    /// number is reduced to its size.
    ///
    /// Currently not used.
    Count(u32),
}
