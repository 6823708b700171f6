//! Conversion between our types and rdma-core types. This module does not call the libraries, so it
//! can also be used by libraries which replace them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use riser_rdma_core_sys::bindings::*;

use crate::verbs::{
    Access, AhAttr, AltPath, CmError, ConnParam, Ece, Gid, Mtu, PathMigState, PostReason, QKey,
    QpAttr, QpState, QpType, SendFlags, SendWr, VerbsError, WcOpcode, WcStatus,
};

/// Returns the error of the last failed call on this thread.
pub(super) fn last_os_error() -> VerbsError {
    VerbsError::Os(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// Checks the result of a call that returns 0 or an `errno` value.
pub(super) fn checked(errno: i32) -> Result<(), VerbsError> {
    match errno.abs() {
        0 => Ok(()),
        libc::EBUSY => Err(VerbsError::ResourceBusy("an object of the device")),
        other => Err(VerbsError::Os(other)),
    }
}

/// Returns the error of a call that creates an object which may not be supported by the device.
pub(super) fn refused(errno: i32, what: &'static str) -> VerbsError {
    match errno.abs() {
        libc::EOPNOTSUPP | libc::ENOSYS => VerbsError::Unsupported(what),
        other => VerbsError::Os(other),
    }
}

/// Same as [`refused`], using the thread's `errno`.
pub(super) fn last_refusal(what: &'static str) -> VerbsError {
    let errno = std::io::Error::last_os_error().raw_os_error();
    refused(errno.unwrap_or(0), what)
}

/// Checks the result of an RDMA CM call: 0, or -1 if an error was set in `errno`.
pub(super) fn checked_cm(result: i32) -> Result<(), CmError> {
    if result == 0 {
        return Ok(());
    }
    Err(match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EADDRINUSE) => CmError::AddressInUse,
        Some(libc::EADDRNOTAVAIL | libc::ENODEV) => CmError::AddressNotAvailable,
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH) => CmError::Unreachable,
        Some(libc::EINVAL) => CmError::InvalidState("this call"),
        other => CmError::Verbs(VerbsError::Os(other.unwrap_or(0))),
    })
}

/// Returns the reject reason using IB CM numbers. For iWARP devices, the status is an error code:
/// connection refused by TCP (8: no listener), or connection reset after a negative reply (28:
/// rejected by consumer).
pub(super) fn reject_reason(status: i32) -> u16 {
    match -status {
        libc::ECONNREFUSED => 8,
        libc::ECONNRESET => 28,
        _ => u16::try_from(status).unwrap_or(u16::MAX),
    }
}

/// Returns the error for the status of a CM event.
pub(super) fn event_error(status: i32) -> CmError {
    match status.abs() {
        libc::ETIMEDOUT => CmError::Timeout,
        libc::ENETUNREACH | libc::EHOSTUNREACH => CmError::Unreachable,
        libc::EADDRNOTAVAIL | libc::ENODEV => CmError::AddressNotAvailable,
        other => CmError::Verbs(VerbsError::Os(other)),
    }
}

pub(super) fn access_flags(access: Access) -> u32 {
    [
        (Access::LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_WRITE, IBV_ACCESS_REMOTE_WRITE),
        (Access::REMOTE_READ, IBV_ACCESS_REMOTE_READ),
        (Access::REMOTE_ATOMIC, IBV_ACCESS_REMOTE_ATOMIC),
        (Access::MW_BIND, IBV_ACCESS_MW_BIND),
        (Access::ON_DEMAND, IBV_ACCESS_ON_DEMAND),
    ]
    .into_iter()
    .filter(|(ours, _)| access.contains(*ours))
    .fold(0, |flags, (_, theirs)| flags | theirs)
}

/// Converts access flags. Unknown flags are ignored.
#[must_use]
pub fn access_of(flags: u32) -> Access {
    [
        (Access::LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_WRITE, IBV_ACCESS_REMOTE_WRITE),
        (Access::REMOTE_READ, IBV_ACCESS_REMOTE_READ),
        (Access::REMOTE_ATOMIC, IBV_ACCESS_REMOTE_ATOMIC),
        (Access::MW_BIND, IBV_ACCESS_MW_BIND),
        (Access::ON_DEMAND, IBV_ACCESS_ON_DEMAND),
    ]
    .into_iter()
    .filter(|(_, theirs)| flags & theirs != 0)
    .fold(Access::empty(), |access, (ours, _)| access | ours)
}

pub(super) fn send_flags(wr: &SendWr<'_>) -> u32 {
    [
        (wr.flags.contains(SendFlags::SIGNALED), IBV_SEND_SIGNALED),
        (wr.flags.contains(SendFlags::SOLICITED), IBV_SEND_SOLICITED),
        (wr.flags.contains(SendFlags::FENCE), IBV_SEND_FENCE),
        (wr.inline.is_some(), IBV_SEND_INLINE),
    ]
    .into_iter()
    .filter(|(is_set, _)| *is_set)
    .fold(0, |all, (_, theirs)| all | theirs)
}

/// Converts send flags. Unknown flags and the inline flag are ignored.
#[must_use]
pub fn send_flags_of(flags: u32) -> SendFlags {
    [
        (SendFlags::SIGNALED, IBV_SEND_SIGNALED),
        (SendFlags::SOLICITED, IBV_SEND_SOLICITED),
        (SendFlags::FENCE, IBV_SEND_FENCE),
    ]
    .into_iter()
    .filter(|(_, theirs)| flags & theirs != 0)
    .fold(SendFlags::empty(), |all, (ours, _)| all | ours)
}

pub(super) fn mtu(theirs: ibv_mtu) -> Option<Mtu> {
    u8::try_from(theirs).ok().and_then(Mtu::from_code)
}

/// Converts a QP type. This will return `None` if it can't be created by user space.
pub(super) fn qp_type(ours: QpType) -> Option<ibv_qp_type> {
    Some(match ours {
        QpType::Rc => IBV_QPT_RC,
        QpType::Uc => IBV_QPT_UC,
        QpType::Ud => IBV_QPT_UD,
        QpType::XrcIni => IBV_QPT_XRC_SEND,
        QpType::XrcTgt => IBV_QPT_XRC_RECV,
        QpType::Gsi | QpType::Smi | QpType::RawPacket => return None,
    })
}

/// The numeric values are the same, but we use a table so that we don't rely on this.
const STATES: [(QpState, ibv_qp_state); 7] = [
    (QpState::Reset, IBV_QPS_RESET),
    (QpState::Init, IBV_QPS_INIT),
    (QpState::Rtr, IBV_QPS_RTR),
    (QpState::Rts, IBV_QPS_RTS),
    (QpState::Sqd, IBV_QPS_SQD),
    (QpState::Sqe, IBV_QPS_SQE),
    (QpState::Error, IBV_QPS_ERR),
];

pub(super) fn state_of(theirs: ibv_qp_state) -> QpState {
    STATES
        .iter()
        .find(|(_, t)| *t == theirs)
        .map_or(QpState::Error, |(o, _)| *o)
}

pub(super) fn state(ours: QpState) -> ibv_qp_state {
    STATES
        .iter()
        .find(|(o, _)| *o == ours)
        .map_or(IBV_QPS_UNKNOWN, |(_, t)| *t)
}

pub(super) fn wc_status(theirs: ibv_wc_status) -> WcStatus {
    match theirs {
        IBV_WC_SUCCESS => WcStatus::Success,
        IBV_WC_LOC_LEN_ERR => WcStatus::LocLenErr,
        IBV_WC_LOC_QP_OP_ERR => WcStatus::LocQpOpErr,
        IBV_WC_LOC_PROT_ERR => WcStatus::LocProtErr,
        IBV_WC_WR_FLUSH_ERR => WcStatus::WrFlushErr,
        IBV_WC_MW_BIND_ERR => WcStatus::MwBindErr,
        IBV_WC_BAD_RESP_ERR => WcStatus::BadRespErr,
        IBV_WC_LOC_ACCESS_ERR => WcStatus::LocAccessErr,
        IBV_WC_REM_INV_REQ_ERR => WcStatus::RemInvReqErr,
        IBV_WC_REM_ACCESS_ERR => WcStatus::RemAccessErr,
        IBV_WC_REM_OP_ERR => WcStatus::RemOpErr,
        IBV_WC_RETRY_EXC_ERR | IBV_WC_RESP_TIMEOUT_ERR => WcStatus::RetryExcErr,
        IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::RnrRetryExcErr,
        IBV_WC_REM_ABORT_ERR => WcStatus::RemAbortErr,
        // A request with an unknown status has still been completed.
        _ => WcStatus::FatalErr,
    }
}

/// Converts a completion status to the value used in `ibv_wc`.
#[must_use]
pub fn wc_status_code(ours: WcStatus) -> ibv_wc_status {
    match ours {
        WcStatus::Success => IBV_WC_SUCCESS,
        WcStatus::LocLenErr => IBV_WC_LOC_LEN_ERR,
        WcStatus::LocQpOpErr => IBV_WC_LOC_QP_OP_ERR,
        WcStatus::LocProtErr => IBV_WC_LOC_PROT_ERR,
        WcStatus::WrFlushErr => IBV_WC_WR_FLUSH_ERR,
        WcStatus::MwBindErr => IBV_WC_MW_BIND_ERR,
        WcStatus::BadRespErr => IBV_WC_BAD_RESP_ERR,
        WcStatus::LocAccessErr => IBV_WC_LOC_ACCESS_ERR,
        WcStatus::RemInvReqErr => IBV_WC_REM_INV_REQ_ERR,
        WcStatus::RemAccessErr => IBV_WC_REM_ACCESS_ERR,
        WcStatus::RemOpErr => IBV_WC_REM_OP_ERR,
        WcStatus::RetryExcErr => IBV_WC_RETRY_EXC_ERR,
        WcStatus::RnrRetryExcErr => IBV_WC_RNR_RETRY_EXC_ERR,
        WcStatus::RemAbortErr => IBV_WC_REM_ABORT_ERR,
        WcStatus::FatalErr => IBV_WC_FATAL_ERR,
    }
}

/// Converts a completion opcode to the value used in `ibv_wc`. There is no value for fast
/// registration: rdma-core reports it using a driver opcode.
#[must_use]
pub fn wc_opcode_code(ours: WcOpcode) -> ibv_wc_opcode {
    match ours {
        WcOpcode::Send => IBV_WC_SEND,
        WcOpcode::Write => IBV_WC_RDMA_WRITE,
        WcOpcode::Read => IBV_WC_RDMA_READ,
        WcOpcode::CmpSwap => IBV_WC_COMP_SWAP,
        WcOpcode::FetchAdd => IBV_WC_FETCH_ADD,
        WcOpcode::RegMr => IBV_WC_DRIVER1,
        WcOpcode::BindMw => IBV_WC_BIND_MW,
        WcOpcode::LocalInv => IBV_WC_LOCAL_INV,
        WcOpcode::Recv => IBV_WC_RECV,
        WcOpcode::RecvWriteImm => IBV_WC_RECV_RDMA_WITH_IMM,
    }
}

/// Returns the opcode of a successful completion. `posted` is the opcode of the work request.
pub(super) fn wc_opcode(theirs: ibv_wc_opcode, posted: WcOpcode) -> WcOpcode {
    match theirs {
        IBV_WC_RECV_RDMA_WITH_IMM => WcOpcode::RecvWriteImm,
        IBV_WC_RECV => WcOpcode::Recv,
        _ => posted,
    }
}

/// Converts the `errno` of a failed post.
pub(super) fn post_reason(errno: i32) -> PostReason {
    match errno.abs() {
        libc::ENOMEM | libc::ENOSPC | libc::EAGAIN => PostReason::QueueFull,
        libc::EINVAL => PostReason::InvalidRequest("rejected by the device"),
        libc::EOPNOTSUPP => PostReason::InvalidOpcode,
        other => PostReason::Os(other),
    }
}

/// Converts an address vector to the rdma-core type.
#[must_use]
pub fn ah_attr(ours: &AhAttr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: ours.dgid.0 },
            flow_label: ours.flow_label,
            sgid_index: ours.sgid_index as u8,
            hop_limit: ours.hop_limit,
            traffic_class: ours.traffic_class,
        },
        is_global: 1,
        port_num: ours.port,
        ..Default::default()
    }
}

/// Converts an address vector with a global route. The flow label has 20 bits; some programs set
/// more than that, but an adapter ignores them as well.
#[must_use]
pub fn ah_attr_of(theirs: &ibv_ah_attr) -> AhAttr {
    AhAttr {
        // SAFETY: a GID is 16 bytes, and any value is valid.
        dgid: Gid(unsafe { theirs.grh.dgid.raw }),
        sgid_index: u16::from(theirs.grh.sgid_index),
        hop_limit: theirs.grh.hop_limit,
        traffic_class: theirs.grh.traffic_class,
        flow_label: theirs.grh.flow_label & 0x000f_ffff,
        port: theirs.port_num,
    }
}

/// Converts attributes for `ibv_modify_qp`, including the mask of attributes to set.
#[must_use]
pub fn qp_attr(ours: &QpAttr) -> (ibv_qp_attr, u32) {
    let mut theirs = ibv_qp_attr::default();
    let mut mask = 0;
    macro_rules! set {
        ($($from:ident => $to:ident, $bit:ident, $value:expr;)*) => {$(
            if let Some($from) = ours.$from {
                theirs.$to = $value;
                mask |= $bit;
            }
        )*};
    }
    // This list sets both the value and the mask bit, to ensure that they are always set together.
    set! {
        state => qp_state, IBV_QP_STATE, self::state(state);
        pkey_index => pkey_index, IBV_QP_PKEY_INDEX, pkey_index;
        port => port_num, IBV_QP_PORT, port;
        access => qp_access_flags, IBV_QP_ACCESS_FLAGS, access_flags(access);
        qkey => qkey, IBV_QP_QKEY, qkey.0;
        ah => ah_attr, IBV_QP_AV, ah_attr(&ah);
        path_mtu => path_mtu, IBV_QP_PATH_MTU, u32::from(path_mtu.code());
        dest_qp => dest_qp_num, IBV_QP_DEST_QPN, dest_qp;
        rq_psn => rq_psn, IBV_QP_RQ_PSN, rq_psn;
        sq_psn => sq_psn, IBV_QP_SQ_PSN, sq_psn;
        max_dest_rd_atomic => max_dest_rd_atomic, IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic;
        max_rd_atomic => max_rd_atomic, IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic;
        min_rnr_timer => min_rnr_timer, IBV_QP_MIN_RNR_TIMER, min_rnr_timer;
        timeout => timeout, IBV_QP_TIMEOUT, timeout;
        retry_cnt => retry_cnt, IBV_QP_RETRY_CNT, retry_cnt;
        rnr_retry => rnr_retry, IBV_QP_RNR_RETRY, rnr_retry;
        path_mig_state => path_mig_state, IBV_QP_PATH_MIG_STATE, mig_state(path_mig_state);
        en_sqd_async_notify => en_sqd_async_notify, IBV_QP_EN_SQD_ASYNC_NOTIFY,
            u8::from(en_sqd_async_notify);
    }
    if let Some(path) = ours.alt_path {
        theirs.alt_ah_attr = ah_attr(&path.ah);
        theirs.alt_port_num = path.ah.port;
        theirs.alt_pkey_index = path.pkey_index;
        theirs.alt_timeout = path.timeout;
        mask |= IBV_QP_ALT_PATH;
    }
    (theirs, mask)
}

/// Converts attributes of `ibv_modify_qp`, if they are set in `mask`.
///
/// # Errors
/// [`VerbsError::InvalidParameter`] if a value is out of range, [`VerbsError::Os`] with
/// `EOPNOTSUPP` if an attribute is not supported, and with `EINVAL` if there are unknown bits.
pub fn qp_attr_from_mask(theirs: &ibv_qp_attr, mask: u32) -> Result<QpAttr, VerbsError> {
    const KNOWN: u32 = IBV_QP_STATE
        | IBV_QP_CUR_STATE
        | IBV_QP_EN_SQD_ASYNC_NOTIFY
        | IBV_QP_ACCESS_FLAGS
        | IBV_QP_PKEY_INDEX
        | IBV_QP_PORT
        | IBV_QP_QKEY
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_QP_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER
        | IBV_QP_SQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_ALT_PATH
        | IBV_QP_PATH_MIG_STATE
        | IBV_QP_DEST_QPN;
    const ABSENT: u32 = IBV_QP_CAP | IBV_QP_RATE_LIMIT;
    if mask & !(KNOWN | ABSENT) != 0 {
        return Err(VerbsError::Os(libc::EINVAL));
    }
    if mask & ABSENT != 0 {
        return Err(VerbsError::Os(libc::EOPNOTSUPP));
    }
    let given = |bit: u32| mask & bit != 0;
    let state = given(IBV_QP_STATE)
        .then(|| {
            let known = STATES.iter().find(|(_, t)| *t == theirs.qp_state);
            known
                .map(|(ours, _)| *ours)
                .ok_or(VerbsError::InvalidParameter("qp_state"))
        })
        .transpose()?;
    let path_mtu = given(IBV_QP_PATH_MTU)
        .then(|| mtu(theirs.path_mtu).ok_or(VerbsError::InvalidParameter("path_mtu")))
        .transpose()?;
    let ah = given(IBV_QP_AV)
        .then(|| {
            // Without a global route, there is no address for RoCE.
            (theirs.ah_attr.is_global != 0)
                .then(|| ah_attr_of(&theirs.ah_attr))
                .ok_or(VerbsError::InvalidParameter("ah_attr.is_global"))
        })
        .transpose()?;
    let alt_path = given(IBV_QP_ALT_PATH)
        .then(|| alt_path_of(theirs).ok_or(VerbsError::InvalidParameter("alt_ah_attr.is_global")))
        .transpose()?;
    let path_mig_state = given(IBV_QP_PATH_MIG_STATE)
        .then(|| {
            mig_state_of(theirs.path_mig_state)
                .ok_or(VerbsError::InvalidParameter("path_mig_state"))
        })
        .transpose()?;
    macro_rules! take {
        ($bit:ident, $value:expr) => {
            given($bit).then(|| $value)
        };
    }
    Ok(QpAttr {
        state,
        path_mtu,
        ah,
        alt_path,
        path_mig_state,
        en_sqd_async_notify: take!(IBV_QP_EN_SQD_ASYNC_NOTIFY, theirs.en_sqd_async_notify != 0),
        pkey_index: take!(IBV_QP_PKEY_INDEX, theirs.pkey_index),
        port: take!(IBV_QP_PORT, theirs.port_num),
        access: take!(IBV_QP_ACCESS_FLAGS, access_of(theirs.qp_access_flags)),
        qkey: take!(IBV_QP_QKEY, QKey(theirs.qkey)),
        dest_qp: take!(IBV_QP_DEST_QPN, theirs.dest_qp_num),
        rq_psn: take!(IBV_QP_RQ_PSN, theirs.rq_psn),
        sq_psn: take!(IBV_QP_SQ_PSN, theirs.sq_psn),
        max_dest_rd_atomic: take!(IBV_QP_MAX_DEST_RD_ATOMIC, theirs.max_dest_rd_atomic),
        max_rd_atomic: take!(IBV_QP_MAX_QP_RD_ATOMIC, theirs.max_rd_atomic),
        min_rnr_timer: take!(IBV_QP_MIN_RNR_TIMER, theirs.min_rnr_timer),
        timeout: take!(IBV_QP_TIMEOUT, theirs.timeout),
        retry_cnt: take!(IBV_QP_RETRY_CNT, theirs.retry_cnt),
        rnr_retry: take!(IBV_QP_RNR_RETRY, theirs.rnr_retry),
        sq_draining: None,
        pkey: None,
    })
}

/// Converts attributes returned by `ibv_query_qp`. This call also sets values for attributes that
/// don't exist for this QP type.
pub(super) fn qp_attr_of(theirs: &ibv_qp_attr, qp_type: QpType) -> QpAttr {
    let is_requester = matches!(qp_type, QpType::Rc | QpType::XrcIni);
    let is_responder = matches!(qp_type, QpType::Rc | QpType::XrcTgt);
    QpAttr {
        state: Some(state_of(theirs.qp_state)),
        pkey_index: Some(theirs.pkey_index),
        port: Some(theirs.port_num),
        access: Some(access_of(theirs.qp_access_flags)),
        qkey: Some(QKey(theirs.qkey)),
        ah: Some(ah_attr_of(&theirs.ah_attr)),
        path_mtu: mtu(theirs.path_mtu),
        dest_qp: Some(theirs.dest_qp_num),
        rq_psn: Some(theirs.rq_psn),
        sq_psn: Some(theirs.sq_psn),
        max_dest_rd_atomic: is_responder.then_some(theirs.max_dest_rd_atomic),
        max_rd_atomic: is_requester.then_some(theirs.max_rd_atomic),
        min_rnr_timer: is_responder.then_some(theirs.min_rnr_timer),
        timeout: (is_requester || is_responder).then_some(theirs.timeout),
        retry_cnt: is_requester.then_some(theirs.retry_cnt),
        rnr_retry: is_requester.then_some(theirs.rnr_retry),
        alt_path: alt_path_of(theirs).filter(|path| path.ah.dgid != Gid::default()),
        path_mig_state: mig_state_of(theirs.path_mig_state),
        en_sqd_async_notify: None,
        sq_draining: Some(theirs.sq_draining != 0),
        pkey: None,
    }
}

/// Path migration states and their rdma-core values.
const MIG_STATES: [(PathMigState, ibv_mig_state); 3] = [
    (PathMigState::Migrated, IBV_MIG_MIGRATED),
    (PathMigState::Rearm, IBV_MIG_REARM),
    (PathMigState::Armed, IBV_MIG_ARMED),
];

/// Converts a path migration state to the rdma-core value.
#[must_use]
pub fn mig_state(ours: PathMigState) -> ibv_mig_state {
    let known = MIG_STATES.iter().find(|(state, _)| *state == ours);
    known.map_or(IBV_MIG_MIGRATED, |(_, theirs)| *theirs)
}

fn mig_state_of(theirs: ibv_mig_state) -> Option<PathMigState> {
    let known = MIG_STATES.iter().find(|(_, number)| *number == theirs);
    known.map(|(state, _)| *state)
}

/// Returns the alternate path from attributes, or `None` if there is no global route, which is
/// required for RoCE.
fn alt_path_of(theirs: &ibv_qp_attr) -> Option<AltPath> {
    (theirs.alt_ah_attr.is_global != 0).then(|| AltPath {
        // The port is included twice in the attributes.
        ah: AhAttr {
            port: theirs.alt_port_num,
            ..ah_attr_of(&theirs.alt_ah_attr)
        },
        pkey_index: theirs.alt_pkey_index,
        timeout: theirs.alt_timeout,
    })
}

/// Converts vendor options to the rdma-core type.
pub(super) fn ece(ours: Ece) -> ibv_ece {
    ibv_ece {
        vendor_id: ours.vendor_id,
        options: ours.options,
        comp_mask: 0,
    }
}

/// Address in the format used by the socket API.
#[repr(C)]
pub union SockAddr {
    any: sockaddr,
    v4: sockaddr_in,
    v6: sockaddr_in6,
}

impl SockAddr {
    /// Converts an address to the format used by the socket API.
    #[must_use]
    pub fn new(addr: SocketAddr) -> Self {
        match addr {
            SocketAddr::V4(a) => Self {
                v4: sockaddr_in {
                    sin_family: libc::AF_INET as u16,
                    sin_port: a.port().to_be(),
                    sin_addr: in_addr {
                        s_addr: u32::from_ne_bytes(a.ip().octets()),
                    },
                    ..Default::default()
                },
            },
            SocketAddr::V6(a) => Self {
                v6: sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as u16,
                    sin6_port: a.port().to_be(),
                    sin6_flowinfo: a.flowinfo(),
                    sin6_addr: in6_addr {
                        __in6_u: in6_addr__bindgen_ty_1 {
                            __u6_addr8: a.ip().octets(),
                        },
                    },
                    sin6_scope_id: a.scope_id(),
                },
            },
        }
    }

    /// Returns the length of the address in bytes.
    #[must_use]
    pub fn length(&self) -> u32 {
        // SAFETY: the address family is always the first field.
        let is_v4 = i32::from(unsafe { self.any.sa_family }) == libc::AF_INET;
        let length = match is_v4 {
            true => size_of::<sockaddr_in>(),
            false => size_of::<sockaddr_in6>(),
        };
        length as u32
    }

    /// Returns a pointer to be passed to a call.
    pub fn as_mut_ptr(&mut self) -> *mut sockaddr {
        (&raw mut *self).cast()
    }
}

/// Returns the address from the route of a CM id, or `None` if the address family is not IPv4 or
/// IPv6.
#[must_use]
pub fn socket_addr(storage: &sockaddr_storage) -> Option<SocketAddr> {
    let p: *const sockaddr_storage = storage;
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the storage is large enough, and the family indicates that it contains an
            // IPv4 address.
            let a = unsafe { &*p.cast::<sockaddr_in>() };
            let ip = Ipv4Addr::from(a.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(a.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: the storage is large enough, and the family indicates that it contains an
            // IPv6 address.
            let a = unsafe { &*p.cast::<sockaddr_in6>() };
            // SAFETY: an IPv6 address is 16 bytes, and any value is valid.
            let ip = Ipv6Addr::from(unsafe { a.sin6_addr.__in6_u.__u6_addr8 });
            Some(SocketAddr::new(IpAddr::V6(ip), u16::from_be(a.sin6_port)))
        }
        _ => None,
    }
}

/// Converts connection parameters. The result borrows the private data of `ours`.
#[must_use]
pub fn conn_param(ours: &ConnParam, qp_num: u32) -> rdma_conn_param {
    rdma_conn_param {
        private_data: ours.private_data.as_ptr().cast(),
        private_data_len: ours.private_data.len() as u8,
        responder_resources: ours.responder_resources,
        initiator_depth: ours.initiator_depth,
        flow_control: u8::from(ours.flow_control),
        retry_count: ours.retry_count,
        rnr_retry_count: ours.rnr_retry_count,
        srq: u8::from(ours.srq),
        qp_num,
    }
}

/// Converts parameters for the event of a datagram id. The result borrows the private data of
/// `ours`.
pub fn ud_param(ours: &ConnParam) -> rdma_ud_param {
    rdma_ud_param {
        private_data: ours.private_data.as_ptr().cast(),
        private_data_len: ours.private_data.len() as u8,
        ah_attr: ours.ah.as_ref().map(ah_attr).unwrap_or_default(),
        qp_num: ours.qp_num,
        qkey: ours.qkey.map_or(0, |qkey| qkey.0),
    }
}

/// Copies the private data of an event.
///
/// # Safety
/// `data` must be null or point to `len` valid bytes.
unsafe fn private_data(data: *const libc::c_void, len: u8) -> Vec<u8> {
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: ensured by the caller.
    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len.into()) }.to_vec()
}

/// Converts the peer's parameters from a connection event.
///
/// # Safety
/// The private data of `theirs` must be valid.
pub unsafe fn conn_param_of(theirs: &rdma_conn_param) -> ConnParam {
    ConnParam {
        // SAFETY: ensured by the caller.
        private_data: unsafe { private_data(theirs.private_data, theirs.private_data_len) },
        responder_resources: theirs.responder_resources,
        initiator_depth: theirs.initiator_depth,
        flow_control: theirs.flow_control != 0,
        retry_count: theirs.retry_count,
        rnr_retry_count: theirs.rnr_retry_count,
        srq: theirs.srq != 0,
        qp_num: theirs.qp_num,
        // The library has separate calls for this.
        ece: Ece::default(),
        qkey: None,
        ah: None,
    }
}

/// Same as [`conn_param_of`], for the event of a datagram id.
///
/// # Safety
/// See [`conn_param_of`].
pub(super) unsafe fn ud_param_of(theirs: &rdma_ud_param) -> ConnParam {
    ConnParam {
        // SAFETY: ensured by the caller.
        private_data: unsafe { private_data(theirs.private_data, theirs.private_data_len) },
        qp_num: theirs.qp_num,
        qkey: Some(QKey(theirs.qkey)),
        ah: Some(ah_attr_of(&theirs.ah_attr)),
        ..ConnParam::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_convert_both_ways() {
        for text in ["10.99.0.1:5555", "[fd99::2]:3260", "[fe80::1%3]:1"] {
            let addr: SocketAddr = text.parse().unwrap();
            let mut raw = SockAddr::new(addr);
            let mut storage = sockaddr_storage::default();
            // SAFETY: both address types fit into the storage, and both are plain bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    raw.as_mut_ptr().cast::<u8>(),
                    (&raw mut storage).cast::<u8>(),
                    size_of::<SockAddr>(),
                );
            }
            let back = socket_addr(&storage).unwrap();
            assert_eq!((back.ip(), back.port()), (addr.ip(), addr.port()));
        }
        assert_eq!(socket_addr(&sockaddr_storage::default()), None);
    }

    #[test]
    fn only_given_attributes_are_masked() {
        let (theirs, mask) = qp_attr(&QpAttr {
            state: Some(QpState::Rtr),
            dest_qp: Some(17),
            path_mtu: Some(Mtu::Mtu1024),
            ..Default::default()
        });
        assert_eq!(mask, 1 | 1 << 20 | 1 << 8);
        assert_eq!(
            (theirs.qp_state, theirs.dest_qp_num, theirs.path_mtu),
            (2, 17, 3)
        );
    }

    #[test]
    fn access_flags_convert_both_ways() {
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        assert_eq!(access_flags(access), 0b101);
        assert_eq!(access_of(0b101), access);
    }
}
