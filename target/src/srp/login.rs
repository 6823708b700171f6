//! The decision whether to accept a login: a pure function of the request, the limits of the
//! portal, and the existing channels.

use std::net::IpAddr;
use std::sync::Arc;

use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::srp::{
    BufferFormats, ImmediateDataOffset, LoginRejReason, LoginReq, LoginReqFlags, LoginRsp,
    MIN_MAX_IU_LEN, MultiChannelAction, MultiChannelResult, Tag,
};

use super::action::Action;
use super::ioctx::{RecvIdx, SendIoctx};
use crate::fabric::{ConnectionMemory, Contexts, LunMap, TaskIdx};

/// Receives in addition to the request limit: responses to CRED_REQ and AER_REQ, a logout, and a
/// spare. These do not need a credit.
pub const SPARE_RECEIVES: u32 = 4;

/// Maximum number of messages initiated by the target per channel: CRED_REQ, AER_REQ, T_LOGOUT.
/// Each has a reserved context and a reserved entry in the send queue.
pub const OWN_MESSAGES: u32 = 3;

/// Maximum size of an information unit that we send: a response with response data and the maximum
/// sense data.
pub const MAX_TI_IU: u32 = 36 + 4 + 252;

/// Limits of a portal, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoginLimits {
    /// Maximum number of outstanding requests per channel.
    pub req_lim: u32,
    /// Maximum size of an information unit from the initiator, in bytes.
    pub max_it_iu_len: u32,
    /// Maximum number of channels per I_T nexus.
    pub max_channels: u32,
    /// Send queue size of a channel, in work requests.
    pub send_queue: u32,
}

impl Default for LoginLimits {
    fn default() -> Self {
        Self {
            req_lim: 128,
            max_it_iu_len: 8276,
            max_channels: 16,
            send_queue: 512,
        }
    }
}

/// The result of access control for an initiator port and a target port.
#[derive(Clone, Debug)]
pub enum Admission {
    /// The initiator can access these logical units.
    Allowed(Arc<LunMap>),
    /// The initiator is not in the access list.
    Denied,
    /// The target port does not exist.
    UnknownTarget,
}

/// The reason why a login was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoginRefused {
    /// The reason code for SRP_LOGIN_REJ.
    pub reason: LoginRejReason,
    /// The reason for the audit log, which is common to all protocols. SRP uses the same code if
    /// access control denies the initiator and if the target does not exist.
    pub audit: &'static str,
    /// The address to which the initiator is redirected.
    pub redirect: Option<IpAddr>,
}

impl LoginRefused {
    /// Creates a rejection, based on the result of access control.
    #[must_use]
    pub fn new(reason: LoginRejReason, admission: &Admission) -> Self {
        let audit = match (reason, admission) {
            (LoginRejReason::UnableToAssociateChannel, Admission::Denied) => {
                LoginStatus::AUTHORIZATION_FAILURE.name()
            }
            (LoginRejReason::UnableToAssociateChannel, Admission::UnknownTarget) => {
                LoginStatus::NOT_FOUND.name()
            }
            (reason, _) => reason.name(),
        };
        Self {
            reason,
            audit,
            redirect: None,
        }
    }

    /// Creates a redirection to another address.
    #[must_use]
    pub fn redirected(to: IpAddr) -> Self {
        Self {
            reason: LoginRejReason::UnableToEstablishChannel,
            audit: LoginStatus::MOVED_TEMPORARILY.name(),
            redirect: Some(to),
        }
    }
}

impl From<LoginRejReason> for LoginRefused {
    fn from(reason: LoginRejReason) -> Self {
        let audit = reason.name();
        Self {
            reason,
            audit,
            redirect: None,
        }
    }
}

/// State of the target at the time of a login.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoginView {
    /// Existing channels of this I_T nexus.
    pub channels: u32,
    /// True if another channel would exceed the limits for memory, queue pairs or sessions.
    pub exhausted: bool,
    /// True if the target is shutting down.
    pub stopping: bool,
}

/// Channel parameters, which are fixed when it is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelParams {
    /// Maximum number of outstanding requests.
    pub req_lim: u32,
    /// Maximum size of a received information unit, in bytes.
    pub max_it_iu_len: u32,
    /// Maximum size of a sent information unit, in bytes.
    pub max_ti_iu_len: u32,
    /// Send queue size, in work requests.
    pub send_queue: u32,
    /// Offset of immediate data, if it was negotiated.
    pub immediate: Option<ImmediateDataOffset>,
    /// True if the initiator has requested asynchronous events (AER_REQ).
    pub wants_events: bool,
    /// The messages to send as solicited events.
    pub flags: LoginReqFlags,
}

impl ChannelParams {
    /// Returns the number of contexts in the receive ring.
    #[must_use]
    pub fn receives(&self) -> u32 {
        self.req_lim + SPARE_RECEIVES
    }

    /// Returns the number of contexts in the send ring.
    #[must_use]
    pub fn sends(&self) -> u32 {
        self.req_lim + OWN_MESSAGES
    }

    /// Returns the distance between two receive contexts, in bytes.
    #[must_use]
    pub fn receive_stride(&self) -> usize {
        (self.max_it_iu_len as usize).next_multiple_of(64)
    }

    /// Returns the distance between two send contexts, in bytes.
    #[must_use]
    pub fn send_stride(&self) -> usize {
        (self.max_ti_iu_len as usize).next_multiple_of(64)
    }

    /// Returns the memory used by a channel with these parameters and the maximum number of
    /// requests.
    #[must_use]
    pub fn memory(&self) -> ConnectionMemory {
        let (requests, receives) = (self.req_lim as usize, self.receives() as usize);
        // The table has room for twice as many tags, and is not full then.
        let tags = 4 * requests * size_of::<(Tag, TaskIdx)>();
        let lists = receives * (size_of::<(RecvIdx, u32)>() + 2 * size_of::<Action>());
        ConnectionMemory {
            receive_ring: receives * self.receive_stride(),
            send_ring: self.sends() as usize * self.send_stride(),
            contexts: Contexts::<SendIoctx>::memory(requests) + tags + lists,
            queues: ConnectionMemory::of_queues(self.send_queue, self.receives()),
        }
    }
}

/// An accepted login.
#[derive(Clone, Debug)]
pub struct LoginOutcome {
    /// Parameters for the channel to create.
    pub params: ChannelParams,
    /// The SRP_LOGIN_RSP to send.
    pub rsp: LoginRsp,
    /// The logical units that the initiator can access.
    pub luns: Arc<LunMap>,
}

/// Decides whether to accept a login.
///
/// # Errors
/// Returns the reason for SRP_LOGIN_REJ.
pub fn plan_login(
    req: &LoginReq,
    limits: &LoginLimits,
    admission: &Admission,
    view: LoginView,
) -> Result<LoginOutcome, LoginRejReason> {
    if view.stopping {
        return Err(LoginRejReason::UnableToEstablishChannel);
    }
    let luns = match admission {
        Admission::Allowed(luns) => Arc::clone(luns),
        Admission::Denied | Admission::UnknownTarget => {
            return Err(LoginRejReason::UnableToAssociateChannel);
        }
    };
    // The size of the receive ring depends on this, so the initiator must not choose an arbitrary
    // length.
    if !(MIN_MAX_IU_LEN..=limits.max_it_iu_len).contains(&req.req_it_iu_len) {
        return Err(LoginRejReason::ReqItIuLengthTooLarge);
    }
    let supported = BufferFormats::DIRECT | BufferFormats::INDIRECT;
    if !supported.contains(req.formats) {
        return Err(LoginRejReason::UnsupportedDescriptorFormat);
    }
    let keeps_others = req.multi_channel == MultiChannelAction::Multi;
    if keeps_others && view.channels > 0 {
        if limits.max_channels == 1 {
            return Err(LoginRejReason::MultiChannelUnsupported);
        }
        if view.channels >= limits.max_channels {
            return Err(LoginRejReason::ChannelLimitReached);
        }
    }
    // This is checked after the request itself: if a request can never be accepted, the reason
    // should not suggest a retry.
    if view.exhausted {
        return Err(LoginRejReason::InsufficientResources);
    }
    // If the offset is beyond the maximum information unit, there is no room for data, so we do not
    // enable immediate data.
    let immediate = req
        .immediate
        .filter(|offset| offset.bytes() < req.req_it_iu_len as usize);
    let params = ChannelParams {
        req_lim: limits.req_lim,
        max_it_iu_len: req.req_it_iu_len,
        max_ti_iu_len: MAX_TI_IU,
        send_queue: limits.send_queue,
        immediate,
        wants_events: req.flags.contains(LoginReqFlags::AESOLNT),
        flags: req.flags,
    };
    let multi_channel = match (view.channels, keeps_others) {
        (0, _) => MultiChannelResult::NoChannels,
        (_, true) => MultiChannelResult::Maintained,
        (_, false) => MultiChannelResult::Terminated,
    };
    Ok(LoginOutcome {
        params,
        rsp: LoginRsp {
            req_lim_delta: i32::try_from(limits.req_lim).unwrap_or(i32::MAX),
            tag: req.tag,
            max_it_iu_len: req.req_it_iu_len,
            max_ti_iu_len: MAX_TI_IU,
            formats: supported,
            multi_channel,
            solicited_notification: true,
            immediate: immediate.is_some(),
        },
        luns,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_scsi::srp::{InitiatorPortId, TargetPortId};

    fn request() -> LoginReq {
        LoginReq {
            tag: Tag(7),
            req_it_iu_len: 8260,
            formats: BufferFormats::DIRECT | BufferFormats::INDIRECT,
            multi_channel: MultiChannelAction::Single,
            flags: LoginReqFlags::empty(),
            immediate: ImmediateDataOffset::new(68),
            initiator_port: InitiatorPortId([1; 16]),
            target_port: TargetPortId([2; 16]),
        }
    }

    fn decide(
        change: impl FnOnce(&mut LoginReq, &mut LoginLimits, &mut Admission, &mut LoginView),
    ) -> Result<LoginOutcome, LoginRejReason> {
        let mut req = request();
        let mut limits = LoginLimits::default();
        let mut admission = Admission::Allowed(Arc::new(LunMap::default()));
        let mut view = LoginView::default();
        change(&mut req, &mut limits, &mut admission, &mut view);
        plan_login(&req, &limits, &admission, view)
    }

    #[test]
    fn plain_login_is_accepted() {
        let outcome = decide(|_, _, _, _| {}).unwrap();
        assert_eq!(outcome.rsp.req_lim_delta, 128);
        assert_eq!(outcome.rsp.max_it_iu_len, 8260);
        assert_eq!(outcome.rsp.tag, Tag(7));
        assert!(outcome.rsp.immediate);
        assert_eq!(outcome.rsp.multi_channel, MultiChannelResult::NoChannels);
        let memory = outcome.params.memory();
        assert_eq!(memory.receive_ring, 132 * 8320);
        assert_eq!(memory.send_ring, 131 * 320);
        assert!(memory.total() <= 3 << 19, "{memory:?}");
    }

    #[test]
    fn rejections_have_correct_reason() {
        type Change = fn(&mut LoginReq, &mut LoginLimits, &mut Admission, &mut LoginView);
        let cases: [(Change, u32); 10] = [
            (|r, _, _, _| r.req_it_iu_len = 8277, 0x0001_0002),
            (|r, _, _, _| r.req_it_iu_len = 63, 0x0001_0002),
            (|_, _, a, _| *a = Admission::Denied, 0x0001_0003),
            (|_, _, a, _| *a = Admission::UnknownTarget, 0x0001_0003),
            (
                |r, _, _, _| r.formats = BufferFormats::from_bits_retain(0x0008),
                0x0001_0004,
            ),
            (
                |r, l, _, v| {
                    r.multi_channel = MultiChannelAction::Multi;
                    l.max_channels = 1;
                    v.channels = 1;
                },
                0x0001_0005,
            ),
            (
                |r, l, _, v| {
                    r.multi_channel = MultiChannelAction::Multi;
                    l.max_channels = 2;
                    v.channels = 2;
                },
                0x0001_0006,
            ),
            (|_, _, _, v| v.exhausted = true, 0x0001_0001),
            (|_, _, _, v| v.stopping = true, 0x0001_0000),
            // Access is checked first, so that a denied initiator cannot find out any limits.
            (
                |r, _, a, _| {
                    *a = Admission::Denied;
                    r.req_it_iu_len = 1 << 20;
                },
                0x0001_0003,
            ),
        ];
        for (i, (change, code)) in cases.into_iter().enumerate() {
            assert_eq!(u32::from(decide(change).unwrap_err()), code, "case {i}");
        }
    }

    #[test]
    fn other_channels_are_kept_or_terminated() {
        let single = decide(|_, _, _, v| v.channels = 3).unwrap();
        assert_eq!(single.rsp.multi_channel, MultiChannelResult::Terminated);
        let multi = decide(|r, _, _, v| {
            r.multi_channel = MultiChannelAction::Multi;
            v.channels = 3;
        })
        .unwrap();
        assert_eq!(multi.rsp.multi_channel, MultiChannelResult::Maintained);
    }

    #[test]
    fn limits_define_channel_sizes() {
        let with = |send_queue, len| {
            decide(move |r, l, _, _| {
                r.req_it_iu_len = len;
                (l.req_lim, l.max_it_iu_len, l.send_queue) = (17, 2048, send_queue);
            })
        };
        let outcome = with(300, 2048).unwrap();
        assert_eq!(outcome.rsp.req_lim_delta, 17);
        assert_eq!(outcome.rsp.max_it_iu_len, 2048);
        // A response with all sense data (SPC-4 4.5.1).
        assert_eq!(outcome.rsp.max_ti_iu_len, 292);
        let (params, memory) = (outcome.params, outcome.params.memory());
        assert_eq!((params.receives(), params.sends()), (21, 20));
        assert_eq!(memory.receive_ring, 21 * 2048);
        assert_eq!(memory.send_ring, 20 * 320);
        let larger = with(600, 2048).unwrap().params.memory();
        assert!(larger.queues > memory.queues);
        assert_eq!(
            with(300, 2049).unwrap_err(),
            LoginRejReason::ReqItIuLengthTooLarge
        );
    }

    #[test]
    fn immediate_data_needs_room() {
        let outcome = decide(|r, _, _, _| {
            r.req_it_iu_len = 80;
            r.immediate = ImmediateDataOffset::new(80);
        })
        .unwrap();
        assert!(!outcome.rsp.immediate);
        assert_eq!(outcome.params.immediate, None);
    }
}
