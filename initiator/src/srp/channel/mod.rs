//! An SRP channel of an initiator over a reliable connection.
//!
//! [`InitiatorChannel`] creates the login, tracks the request limit and the tags, encodes
//! information units, and checks received ones. It is independent of sessions, time and memory: a
//! request is a tag with a value of its owner.
//!
//! # Invariants
//! - At most `queue_size` commands and one task-management request are outstanding, within the
//!   request limit. One credit is reserved for task management.
//! - A tag consists of a slot and its generation, so that a late response to an earlier use of a
//!   slot is not mistaken for the expected response.
//! - Messages from the target never cause a panic: a violation is reported as an [`SrpFault`], and
//!   the owner closes the channel.

mod types;

use riser_scsi::lun::WireLun;
use riser_scsi::srp::{
    AerRsp, BufferFormats, Cmd, CredRsp, DataBuffer, FromTarget, ILogout, ImmediateDataOffset,
    LoginRej, LoginReq, LoginReqFlags, LoginRsp, MIN_MAX_IU_LEN, MemDesc, Opcode, Residual, Rsp,
    RspCode, SHORT_IU_LEN, TSK_MGMT_LEN, Tag, TskMgmt, TskMgmtFunction,
};
use riser_state::become_state;

pub use self::types::{
    ChannelConfig, ChannelParameters, ChannelState, CommandData, CommandIu, Immediate, Received,
};
use super::descriptor::DescriptorLimits;
use crate::request::{DataLen, MAX_CDB};
use crate::session::{SrpFault, SrpLoginError};

/// Offset of immediate data: after the fixed part, 16 additional CDB bytes, and the length.
const IMMEDIATE_OFFSET: u16 = 48 + 16 + 4;

/// Credits reserved for task management.
const RESERVED: i64 = 1;

/// Flag in the tags of task-management requests.
const TMF_TAG: u64 = 1 << 63;

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    generation: u32,
    /// Value of the owner while a command is outstanding.
    owner: Option<u32>,
    len: DataLen,
    /// Generation that was last abandoned without a response, for which a response may still be
    /// received.
    abandoned: Option<u32>,
}

/// An SRP channel. See the documentation of the module.
#[derive(Debug)]
pub struct InitiatorChannel {
    config: ChannelConfig,
    state: ChannelState,
    agreed: Option<ChannelParameters>,
    login_tag: Tag,
    /// Request limit granted in the login.
    granted: i64,
    req_lim: i64,
    reserved: i64,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Number of outstanding commands with Data-Out.
    writes: usize,
    /// Tag of the outstanding task-management request.
    tmf: Option<Tag>,
    tmfs: u32,
}

impl InitiatorChannel {
    /// Creates a channel in state [`ChannelState::Connecting`].
    ///
    /// # Panics
    /// Panics if the configuration has no room for a command.
    #[must_use]
    pub fn new(config: ChannelConfig) -> Self {
        assert!(config.queue_size > 0 && config.inline_descriptors > 0);
        assert!(config.max_it_iu_len >= MIN_MAX_IU_LEN);
        Self {
            config,
            state: ChannelState::Connecting,
            agreed: None,
            login_tag: Tag(u64::MAX),
            granted: 0,
            req_lim: 0,
            reserved: RESERVED,
            slots: vec![Slot::default(); config.queue_size.into()],
            free: (0..config.queue_size).rev().collect(),
            writes: 0,
            tmf: None,
            tmfs: 0,
        }
    }

    /// Returns the state of the channel.
    #[must_use]
    pub fn state(&self) -> ChannelState {
        self.state
    }

    /// Returns the parameters negotiated in the login, or `None` before.
    #[must_use]
    pub fn agreed(&self) -> Option<&ChannelParameters> {
        self.agreed.as_ref()
    }

    /// Returns the number of commands that are outstanding or not retired.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the number of outstanding commands with Data-Out.
    #[must_use]
    pub fn writes(&self) -> usize {
        self.writes
    }

    /// Returns the current request limit.
    #[must_use]
    pub fn request_limit(&self) -> i64 {
        self.req_lim
    }

    /// Returns the number of credits held by the target without an outstanding request of ours. It
    /// returns credits of aborted commands in a later message.
    #[must_use]
    pub fn unreturned(&self) -> i64 {
        let owned = self.slots.iter().filter(|slot| slot.owner.is_some());
        let outstanding = owned.count() as i64 + i64::from(self.tmf.is_some());
        self.granted - self.req_lim - outstanding
    }

    /// Called when the path was resolved: returns the login request for connecting.
    ///
    /// # Panics
    /// Panics if the channel is not [`ChannelState::Connecting`].
    pub fn begin_login(&mut self) -> LoginReq {
        assert_eq!(self.state, ChannelState::Connecting);
        become_state(&mut self.state, ChannelState::LoggingIn);
        self.login_tag = Tag(0);
        LoginReq {
            tag: self.login_tag,
            req_it_iu_len: self.config.max_it_iu_len,
            formats: BufferFormats::DIRECT | BufferFormats::INDIRECT,
            multi_channel: self.config.multi_channel,
            flags: LoginReqFlags::empty(),
            immediate: (self.config.max_immediate > 0)
                .then(|| ImmediateDataOffset::new(IMMEDIATE_OFFSET))
                .flatten(),
            initiator_port: self.config.initiator_port,
            target_port: self.config.target_port,
        }
    }

    /// Called when the connection is established; `private_data` contains the target's login
    /// response.
    ///
    /// # Errors
    /// [`SrpFault`] if the response is unusable; the channel must be closed.
    pub fn handle_established(
        &mut self,
        private_data: &[u8],
    ) -> Result<ChannelParameters, SrpFault> {
        if self.state != ChannelState::LoggingIn {
            return Err(SrpFault::Unexpected {
                opcode: Opcode::LoginRsp,
                state: self.state.name(),
            });
        }
        let rsp = LoginRsp::parse(private_data)?;
        if rsp.tag != self.login_tag {
            return Err(SrpFault::UnknownTag(rsp.tag));
        }
        if rsp.req_lim_delta < 1 {
            return Err(SrpFault::RequestLimit(rsp.req_lim_delta));
        }
        if rsp.max_it_iu_len < MIN_MAX_IU_LEN {
            return Err(SrpFault::Login("maximum length below 64 bytes"));
        }
        let formats = BufferFormats::DIRECT | BufferFormats::INDIRECT;
        if !rsp.formats.contains(formats) {
            return Err(SrpFault::Login("missing a required buffer format"));
        }
        self.req_lim = rsp.req_lim_delta.into();
        self.granted = self.req_lim;
        self.reserved = if self.req_lim > RESERVED { RESERVED } else { 0 };
        let agreed = self.plan_agreed(&rsp);
        self.agreed = Some(agreed);
        become_state(&mut self.state, ChannelState::Live);
        Ok(agreed)
    }

    fn plan_agreed(&self, rsp: &LoginRsp) -> ChannelParameters {
        // The target's maximum may exceed the requested one, which allows longer immediate data.
        let max_it_iu_len = rsp.max_it_iu_len;
        let table = max_it_iu_len.min(self.config.max_it_iu_len) as usize;
        let longest_header = 48 + (MAX_CDB - 16) + MemDesc::LEN + 4;
        let fit = table.saturating_sub(longest_header) / MemDesc::LEN;
        let inline = fit.min(self.config.inline_descriptors.into()) as u8;
        let room = max_it_iu_len.saturating_sub(IMMEDIATE_OFFSET.into());
        let immediate = (rsp.immediate && self.config.max_immediate > 0 && room > 0)
            .then(|| ImmediateDataOffset::new(IMMEDIATE_OFFSET))
            .flatten()
            .map(|offset| Immediate {
                offset,
                max_len: room.min(self.config.max_immediate),
            });
        ChannelParameters {
            max_it_iu_len,
            descriptors: DescriptorLimits {
                inline,
                external: self.config.external_descriptors,
            },
            immediate,
            multi_channel: rsp.multi_channel,
        }
    }

    /// Returns the error for the CM reason and private data of a rejected connection. An SRP target
    /// includes an SRP_LOGIN_REJ.
    #[must_use]
    pub fn rejection(reason: u16, private_data: &[u8]) -> SrpLoginError {
        match LoginRej::parse(private_data) {
            Ok(rej) => SrpLoginError::Rejected(rej.reason),
            Err(_) => SrpLoginError::Refused(reason),
        }
    }

    /// Returns whether a command can be started.
    #[must_use]
    pub fn can_start(&self) -> bool {
        self.state == ChannelState::Live && self.req_lim > self.reserved && !self.free.is_empty()
    }

    /// Returns whether the target accepts no commands, and there is no outstanding request with
    /// whose response it could grant one.
    pub(crate) fn is_starved(&self) -> bool {
        let is_idle = self.outstanding() == 0 && self.tmf.is_none();
        self.state == ChannelState::Live && self.req_lim <= self.reserved && is_idle
    }

    /// Allocates a tag and a credit for a command of `owner`; returns `None` if not available. Call
    /// [`Self::emit_command`] or [`Self::cancel`] next, and [`Self::retire`] when the command has
    /// completed.
    pub fn reserve(&mut self, owner: u32, len: DataLen) -> Option<Tag> {
        if !self.can_start() {
            return None;
        }
        let index = self.free.pop()?;
        let slot = &mut self.slots[usize::from(index)];
        slot.generation = slot.generation.wrapping_add(1) & 0x7fff_ffff;
        slot.owner = Some(owner);
        slot.len = len;
        self.writes += usize::from(has_data_out(len));
        self.req_lim -= 1;
        Some(Tag(u64::from(slot.generation) << 16 | u64::from(index)))
    }

    /// Releases the tag and the credit of a command that was never sent.
    pub fn cancel(&mut self, tag: Tag) {
        if let Some(index) = self.release(tag) {
            self.req_lim += 1;
            self.free.push(index as u16);
        }
    }

    /// Abandons a command that will not get a response, because the target aborted it. A response
    /// received anyway is [`Received::Stale`]. The target keeps the credit of the command, and
    /// returns it in the delta of a later message.
    pub fn abandon_command(&mut self, tag: Tag) {
        if let Some(index) = self.release(tag) {
            let slot = &mut self.slots[index];
            slot.abandoned = Some(slot.generation);
        }
    }

    fn release(&mut self, tag: Tag) -> Option<usize> {
        let index = self.slot_of(tag)?;
        self.remove_command(index)?;
        Some(index)
    }

    /// Removes the outstanding command of a slot; returns its owner's value.
    fn remove_command(&mut self, index: usize) -> Option<u32> {
        let slot = &mut self.slots[index];
        let owner = slot.owner.take()?;
        slot.abandoned = None;
        self.writes -= usize::from(has_data_out(slot.len));
        Some(owner)
    }

    /// Frees the slot of a completed command when its memory is retired. This must not happen
    /// earlier: the connection has as many slots as the channel, and if a command waited for one,
    /// its abort would overtake it.
    pub fn retire(&mut self, tag: Tag) {
        if let Some(index) = self.slot_of(tag) {
            debug_assert!(self.slots[index].owner.is_none());
            debug_assert!(!self.free.contains(&(index as u16)));
            self.free.push(index as u16);
        }
    }

    /// Returns the slot of a tag if the generation is the current one.
    fn slot_of(&self, tag: Tag) -> Option<usize> {
        let index = (tag.0 & 0xffff) as usize;
        let slot = self.slots.get(index)?;
        (tag.0 >> 16 == u64::from(slot.generation)).then_some(index)
    }

    /// Encodes an SRP_CMD to the start of `out` and returns the length of its header. Immediate
    /// data must directly follow it.
    ///
    /// # Panics
    /// Panics if `out` is too short, immediate data was not negotiated, or the tag is not
    /// outstanding. These are errors of the caller, not of the peer.
    pub fn emit_command(&self, tag: Tag, command: &CommandIu<'_>, out: &mut [u8]) -> usize {
        let index = self.slot_of(tag).expect("a tag of this channel");
        assert!(self.slots[index].owner.is_some());
        let (len, is_out) = match command.len {
            DataLen::None => (0, false),
            DataLen::In(len) => (len, false),
            DataLen::Out(len) => (len, true),
        };
        let buffer = match command.data {
            CommandData::None => DataBuffer::None,
            CommandData::Direct(desc) => DataBuffer::Direct(desc),
            CommandData::Indirect(table) => DataBuffer::Indirect(table),
            CommandData::Immediate => {
                let agreed = self.agreed.expect("a live channel has agreed");
                let immediate = agreed.immediate.expect("immediate data is agreed on");
                DataBuffer::Immediate {
                    offset: immediate.offset,
                    len,
                    data: &[],
                }
            }
        };
        // The target transfers as much as the descriptors specify, so they must match the CDB.
        debug_assert_eq!(buffer.data_len(), len);
        let (data_out, data_in) = if is_out {
            (buffer, DataBuffer::None)
        } else {
            (DataBuffer::None, buffer)
        };
        Cmd {
            tag,
            lun: command.lun,
            task_attr: command.attr,
            notify_success: false,
            notify_failure: false,
            cdb: command.cdb.fixed(),
            additional_cdb: command.cdb.additional(),
            data_out,
            data_in,
        }
        .emit_header(out)
    }

    /// Starts a task-management request and encodes it. Returns `None` if one is already
    /// outstanding, or if there are no credits.
    pub fn start_tsk_mgmt(
        &mut self,
        lun: WireLun,
        function: TskMgmtFunction,
        task: Option<Tag>,
    ) -> Option<[u8; TSK_MGMT_LEN]> {
        if self.state != ChannelState::Live || self.tmf.is_some() || self.req_lim < 1 {
            return None;
        }
        self.tmfs = self.tmfs.wrapping_add(1);
        let tag = Tag(TMF_TAG | u64::from(self.tmfs));
        self.tmf = Some(tag);
        self.req_lim -= 1;
        let mut iu = [0; TSK_MGMT_LEN];
        TskMgmt {
            tag,
            notify_success: false,
            notify_failure: false,
            lun,
            function,
            task_tag: task.unwrap_or_default(),
        }
        .emit(&mut iu);
        Some(iu)
    }

    /// Abandons the task-management request; a late response is [`Received::Stale`].
    pub fn abandon_tsk_mgmt(&mut self) {
        self.tmf = None;
    }

    /// Returns whether a task-management request is outstanding.
    #[must_use]
    pub fn has_tsk_mgmt(&self) -> bool {
        self.tmf.is_some()
    }

    /// Starts closing the channel for new requests. Returns the SRP_I_LOGOUT to send if the channel
    /// is live.
    pub fn begin_disconnect(&mut self) -> Option<[u8; SHORT_IU_LEN]> {
        let live = self.state == ChannelState::Live;
        // If the target has logged out, the channel may already be in this state.
        if !matches!(
            self.state,
            ChannelState::Disconnecting | ChannelState::Disconnected
        ) {
            become_state(&mut self.state, ChannelState::Disconnecting);
        }
        live.then(|| {
            let mut iu = [0; SHORT_IU_LEN];
            ILogout { tag: Tag(0) }.emit(&mut iu);
            iu
        })
    }

    /// Called when the connection was closed, including all outstanding requests.
    pub fn handle_disconnected(&mut self) {
        if self.state != ChannelState::Disconnected {
            become_state(&mut self.state, ChannelState::Disconnected);
        }
    }

    /// Checks a received information unit.
    ///
    /// # Errors
    /// [`SrpFault`]; the channel must be closed.
    pub fn handle_iu<'a>(&mut self, iu: &'a [u8]) -> Result<Received<'a>, SrpFault> {
        let message = FromTarget::parse(iu)?;
        if !matches!(self.state, ChannelState::Live | ChannelState::Disconnecting) {
            return Err(SrpFault::Unexpected {
                opcode: Opcode::of(iu)?,
                state: self.state.name(),
            });
        }
        match message {
            FromTarget::Rsp(rsp) => self.handle_rsp(rsp),
            // Requests of the target also contain credits: ignoring a delta would starve the
            // channel.
            FromTarget::CredReq(req) => {
                self.add_credit(req.req_lim_delta)?;
                let mut response = [0; SHORT_IU_LEN];
                CredRsp { tag: req.tag }.emit(&mut response);
                Ok(Received::Reply(response))
            }
            FromTarget::AerReq(req) => {
                self.add_credit(req.req_lim_delta)?;
                let mut response = [0; SHORT_IU_LEN];
                AerRsp { tag: req.tag }.emit(&mut response);
                Ok(Received::Event {
                    lun: req.lun,
                    sense: req.sense,
                    response,
                })
            }
            FromTarget::TLogout(logout) => {
                if self.state == ChannelState::Live {
                    become_state(&mut self.state, ChannelState::Disconnecting);
                }
                Ok(Received::Logout(logout.reason))
            }
            FromTarget::LoginRsp(_) | FromTarget::LoginRej(_) => Err(SrpFault::Unexpected {
                opcode: Opcode::of(iu)?,
                state: self.state.name(),
            }),
        }
    }

    fn handle_rsp<'a>(&mut self, rsp: Rsp<'a>) -> Result<Received<'a>, SrpFault> {
        if rsp.tag.0 & TMF_TAG != 0 {
            return self.handle_tsk_mgmt_rsp(&rsp);
        }
        let unknown = SrpFault::UnknownTag(rsp.tag);
        let index = self.slot_of(rsp.tag).ok_or(unknown)?;
        let slot = &mut self.slots[index];
        if slot.owner.is_none() {
            if slot.abandoned == Some(slot.generation) {
                slot.abandoned = None;
                self.add_credit(rsp.req_lim_delta)?;
                return Ok(Received::Stale);
            }
            return Err(unknown);
        }
        let len = slot.len;
        check_residual(rsp.data_in, if let DataLen::In(n) = len { n } else { 0 })?;
        check_residual(rsp.data_out, if let DataLen::Out(n) = len { n } else { 0 })?;
        let owner = self.remove_command(index).expect("seen above");
        self.add_credit(rsp.req_lim_delta)?;
        Ok(Received::Response { owner, rsp })
    }

    fn handle_tsk_mgmt_rsp<'a>(&mut self, rsp: &Rsp<'a>) -> Result<Received<'a>, SrpFault> {
        let number = rsp.tag.0 & !TMF_TAG;
        if self.tmf == Some(rsp.tag) {
            self.tmf = None;
            self.add_credit(rsp.req_lim_delta)?;
            // As for a command, a response without response data indicates success.
            return Ok(Received::TskMgmt(rsp.response.unwrap_or(RspCode::Complete)));
        }
        if number >= 1 && number <= u64::from(self.tmfs) {
            self.add_credit(rsp.req_lim_delta)?;
            return Ok(Received::Stale);
        }
        Err(SrpFault::UnknownTag(rsp.tag))
    }

    fn add_credit(&mut self, delta: i32) -> Result<(), SrpFault> {
        let limit = self.req_lim + i64::from(delta);
        if limit.unsigned_abs() > i32::MAX.unsigned_abs().into() {
            return Err(SrpFault::RequestLimit(delta));
        }
        self.req_lim = limit;
        Ok(())
    }
}

fn has_data_out(len: DataLen) -> bool {
    matches!(len, DataLen::Out(1..))
}

/// An underflow cannot exceed the buffer. An overflow may have any value: it is the number of bytes
/// that did not fit.
fn check_residual(residual: Residual, len: u32) -> Result<(), SrpFault> {
    match residual {
        Residual::Under(residual) if residual > len => Err(SrpFault::Residual { residual, len }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
