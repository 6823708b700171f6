//! One SRP channel of an initiator, over one reliable connection.
//!
//! [`InitiatorChannel`] makes the login, keeps the request limit and the tags, writes information
//! units and judges those that arrive. It knows nothing of sessions, time or memory: a request here
//! is a tag with a value of its owner.
//!
//! # Invariants
//! - At most `queue_size` commands and one task-management request are outstanding, and never more
//!   than the request limit allows; one unit of the limit is kept back for task management.
//! - A tag is a slot and the slot's generation, so that an answer to an older use of a slot is told
//!   from the answer that is awaited.
//! - Whatever the target sends, nothing here panics: a violation is a [`ChannelFault`], upon which
//!   the owner closes the channel.

use riser_scsi::srp::{
    AerRsp, BufferFormats, Cmd, CredRsp, DataBuffer, FromTarget, ILogout, ImmediateDataOffset,
    IndirectTable, InitiatorPortId, LoginRej, LoginRejReason, LoginReq, LoginReqFlags, LoginRsp,
    MIN_MAX_IU_LEN, MemDesc, MultiChannelAction, MultiChannelResult, Opcode, Residual, Rsp,
    RspCode, SHORT_IU_LEN, SrpError, TSK_MGMT_LEN, Tag, TargetPortId, TaskAttr, TskMgmt,
    TskMgmtFunction, WireLun,
};

use super::descriptor::DescriptorLimits;

/// Where immediate data begins: behind the fixed part, sixteen more bytes of CDB, and the length.
const IMMEDIATE_OFFSET: u16 = 48 + 16 + 4;

/// Requests of the limit kept back for task management.
const RESERVED: i64 = 1;

/// Marks the tags of task-management requests.
const TMF_TAG: u64 = 1 << 63;

/// Length of a command descriptor block, in bytes, that [`Cdb`] holds at most.
pub const MAX_CDB: usize = 32;

/// What a channel is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelConfig {
    /// Commands outstanding at most.
    pub queue_size: u16,
    /// The longest information unit to ask for, in bytes; at least 64.
    pub max_it_iu_len: u32,
    /// Memory descriptors in a command at most.
    pub inline_descriptors: u8,
    /// Memory descriptors in an external table; 0: none are used.
    pub external_descriptors: u32,
    /// The longest immediate data, in bytes; 0: none is asked for.
    pub max_immediate: u32,
    /// Who logs in.
    pub initiator_port: InitiatorPortId,
    /// Where.
    pub target_port: TargetPortId,
    /// What becomes of other channels of this nexus.
    pub multi_channel: MultiChannelAction,
}

/// Where a channel is in its life.
///
/// ```text
/// Connecting → LoggingIn → Live → Disconnecting → Disconnected
///      └───────────┴─────────────────────────────────↑
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChannelState {
    /// The path to the target is being found.
    Connecting,
    /// The connection request, with the login in it, is out.
    LoggingIn,
    /// The login was accepted; requests flow.
    Live,
    /// No new requests; the connection is being closed.
    Disconnecting,
    /// The connection is gone.
    Disconnected,
}

/// What the login agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The longest information unit that we may send, in bytes.
    pub max_it_iu_len: u32,
    /// Descriptors that a command or a table may hold.
    pub descriptors: DescriptorLimits,
    /// Where immediate data begins and how long it may be; `None`: not agreed.
    pub immediate: Option<Immediate>,
    /// What became of other channels of this nexus.
    pub multi_channel: MultiChannelResult,
}

/// Immediate data as agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// Where it begins in a command.
    pub offset: ImmediateDataOffset,
    /// Its longest, in bytes.
    pub max_len: u32,
}

/// The target did what SRP does not allow. The channel is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelFault {
    /// An information unit is malformed.
    #[error("malformed information unit: {0}")]
    Malformed(#[from] SrpError),
    /// An information unit came that this state does not allow.
    #[error("{opcode:?} while {state:?}")]
    Unexpected {
        /// The information unit's type.
        opcode: Opcode,
        /// The channel's state.
        state: ChannelState,
    },
    /// An answer names a request that is not outstanding.
    #[error("answer with tag {0}, which is not outstanding")]
    UnknownTag(Tag),
    /// A request-limit delta takes the limit out of all bounds.
    #[error("request limit delta {0} is absurd")]
    RequestLimit(i32),
    /// A residual is larger than the buffer it is about.
    #[error("residual of {residual} bytes for a buffer of {len}")]
    Residual {
        /// The residual.
        residual: u32,
        /// The buffer's length.
        len: u32,
    },
    /// The login's answer cannot be worked with.
    #[error("login response: {0}")]
    Login(&'static str),
}

/// Why a login failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoginError {
    /// The target refused, and said why.
    #[error("login refused: {0}")]
    Rejected(LoginRejReason),
    /// The connection was refused without an SRP reason; the value is the CM's.
    #[error("connection refused (CM reason {0})")]
    Refused(u16),
    /// The target's answer is not legal.
    #[error(transparent)]
    Fault(#[from] ChannelFault),
}

/// A command descriptor block of up to [`MAX_CDB`] bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cdb {
    bytes: [u8; MAX_CDB],
    len: u8,
}

impl Cdb {
    /// A copy of `bytes`, or `None` for none or too many.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut cdb = Self {
            bytes: [0; MAX_CDB],
            len: u8::try_from(bytes.len()).ok().filter(|l| *l > 0)?,
        };
        cdb.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(cdb)
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Byte 0.
    #[must_use]
    pub fn opcode(&self) -> u8 {
        self.bytes[0]
    }

    /// The sixteen bytes that SRP_CMD always carries.
    fn fixed(&self) -> [u8; 16] {
        self.bytes[..16].try_into().expect("sixteen of thirty-two")
    }

    /// The rest, in whole words.
    fn additional(&self) -> &[u8] {
        let len = usize::from(self.len).max(16).next_multiple_of(4);
        &self.bytes[16..len]
    }
}

impl std::fmt::Debug for Cdb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cdb({:02x?})", self.as_bytes())
    }
}

/// Which way a command's data goes, and how much, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DataLen {
    /// No data.
    #[default]
    None,
    /// From the target.
    In(u32),
    /// To the target.
    Out(u32),
}

/// A command's data as it goes into the information unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandData<'a> {
    /// None.
    None,
    /// In the information unit, behind its header.
    Immediate,
    /// In the memory of one descriptor.
    Direct(MemDesc),
    /// In the memory of several, all in the command or also in a table.
    Indirect(IndirectTable<'a>),
}

/// A command to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandIu<'a> {
    /// Logical unit.
    pub lun: WireLun,
    /// Task attribute.
    pub attr: TaskAttr,
    /// Command descriptor block.
    pub cdb: &'a Cdb,
    /// Direction and length of the data.
    pub len: DataLen,
    /// Where the data is.
    pub data: CommandData<'a>,
}

/// What an arrived information unit means to the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// A command was answered; its slot is free.
    Response {
        /// The value given when the tag was taken.
        owner: u32,
        /// The answer.
        rsp: Rsp<'a>,
    },
    /// The task-management request was answered.
    TskMgmt(RspCode),
    /// An answer must be sent. Until it has been, the receive should not be posted again.
    Answer([u8; SHORT_IU_LEN]),
    /// An event of a logical unit, and the answer to send.
    Event {
        /// Logical unit.
        lun: WireLun,
        /// What happened.
        sense: &'a [u8],
        /// To send.
        answer: [u8; SHORT_IU_LEN],
    },
    /// The target logged us out and will disconnect.
    Logout(riser_scsi::srp::TLogoutReason),
    /// An answer to a request that was given up before.
    Stale,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    generation: u32,
    /// The owner's value while a command is outstanding.
    owner: Option<u32>,
    len: DataLen,
    /// The generation last given up without an answer, whose answer may still come.
    given_up: Option<u32>,
}

/// One SRP channel. See the module's documentation.
#[derive(Debug)]
pub struct InitiatorChannel {
    config: ChannelConfig,
    state: ChannelState,
    agreed: Option<Agreed>,
    login_tag: Tag,
    req_lim: i64,
    reserved: i64,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Tag of the outstanding task-management request.
    tmf: Option<Tag>,
    /// Task-management requests made.
    tmfs: u32,
}

impl InitiatorChannel {
    /// A channel in state [`ChannelState::Connecting`].
    ///
    /// # Panics
    /// If the configuration has no room for a command.
    #[must_use]
    pub fn new(config: ChannelConfig) -> Self {
        assert!(config.queue_size > 0 && config.inline_descriptors > 0);
        assert!(config.max_it_iu_len >= MIN_MAX_IU_LEN);
        Self {
            config,
            state: ChannelState::Connecting,
            agreed: None,
            login_tag: Tag(u64::MAX),
            req_lim: 0,
            reserved: RESERVED,
            slots: vec![Slot::default(); config.queue_size.into()],
            free: (0..config.queue_size).rev().collect(),
            tmf: None,
            tmfs: 0,
        }
    }

    /// Where the channel is in its life.
    #[must_use]
    pub fn state(&self) -> ChannelState {
        self.state
    }

    /// What the login agreed on; `None` before.
    #[must_use]
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// Commands outstanding.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Requests that the target still takes.
    #[must_use]
    pub fn request_limit(&self) -> i64 {
        self.req_lim
    }

    /// The path is found: the login request to connect with.
    ///
    /// # Panics
    /// If the channel is not [`ChannelState::Connecting`].
    pub fn begin_login(&mut self) -> LoginReq {
        assert_eq!(self.state, ChannelState::Connecting);
        self.state = ChannelState::LoggingIn;
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

    /// The connection is established; `private_data` carries the target's answer.
    ///
    /// # Errors
    /// [`ChannelFault`] if it is no answer that can be worked with; the channel is then to be closed.
    pub fn handle_established(&mut self, private_data: &[u8]) -> Result<Agreed, ChannelFault> {
        if self.state != ChannelState::LoggingIn {
            return Err(ChannelFault::Unexpected {
                opcode: Opcode::LoginRsp,
                state: self.state,
            });
        }
        let rsp = LoginRsp::parse(private_data)?;
        if rsp.tag != self.login_tag {
            return Err(ChannelFault::UnknownTag(rsp.tag));
        }
        if rsp.req_lim_delta < 1 {
            return Err(ChannelFault::RequestLimit(rsp.req_lim_delta));
        }
        if rsp.max_it_iu_len < MIN_MAX_IU_LEN {
            return Err(ChannelFault::Login("maximum length below 64 bytes"));
        }
        let formats = BufferFormats::DIRECT | BufferFormats::INDIRECT;
        if !rsp.formats.contains(formats) {
            return Err(ChannelFault::Login(
                "a buffer format that we need is missing",
            ));
        }
        self.req_lim = rsp.req_lim_delta.into();
        self.reserved = if self.req_lim > RESERVED { RESERVED } else { 0 };
        let agreed = self.plan_agreed(&rsp);
        self.agreed = Some(agreed);
        self.state = ChannelState::Live;
        Ok(agreed)
    }

    fn plan_agreed(&self, rsp: &LoginRsp) -> Agreed {
        // The target's maximum may be above what we asked for, which allows longer immediate data.
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
        Agreed {
            max_it_iu_len,
            descriptors: DescriptorLimits {
                inline,
                external: self.config.external_descriptors,
            },
            immediate,
            multi_channel: rsp.multi_channel,
        }
    }

    /// The connection was refused with a CM reason and private data, in which a target says why.
    pub fn handle_rejected(&mut self, reason: u16, private_data: &[u8]) -> LoginError {
        self.state = ChannelState::Disconnected;
        match LoginRej::parse(private_data) {
            Ok(rej) => LoginError::Rejected(rej.reason),
            Err(_) => LoginError::Refused(reason),
        }
    }

    /// Whether a command can start now.
    #[must_use]
    pub fn can_start(&self) -> bool {
        self.state == ChannelState::Live && self.req_lim > self.reserved && !self.free.is_empty()
    }

    /// Takes a tag and a unit of the request limit for a command of `owner`; `None` where there is
    /// none. Follow with [`Self::emit_command`], or [`Self::cancel`].
    pub fn reserve(&mut self, owner: u32, len: DataLen) -> Option<Tag> {
        if !self.can_start() {
            return None;
        }
        let index = self.free.pop()?;
        let slot = &mut self.slots[usize::from(index)];
        slot.generation = slot.generation.wrapping_add(1) & 0x7fff_ffff;
        slot.owner = Some(owner);
        slot.len = len;
        self.req_lim -= 1;
        Some(Tag(u64::from(slot.generation) << 16 | u64::from(index)))
    }

    /// Gives back a tag whose command was never sent.
    pub fn cancel(&mut self, tag: Tag) {
        if self.release(tag).is_some() {
            self.req_lim += 1;
        }
    }

    /// Gives a command up: it will not be answered, because the target aborted it. An answer that
    /// comes all the same is [`Received::Stale`]. The unit of the request limit that it took stays
    /// with the target, which grants it again in the delta of a later message.
    pub fn give_up(&mut self, tag: Tag) {
        if let Some(index) = self.release(tag) {
            let slot = &mut self.slots[index];
            slot.given_up = Some(slot.generation);
        }
    }

    fn release(&mut self, tag: Tag) -> Option<usize> {
        let index = self.slot_of(tag)?;
        let slot = &mut self.slots[index];
        slot.owner.take()?;
        slot.given_up = None;
        self.free.push(index as u16);
        Some(index)
    }

    /// The slot that a tag names, if its generation is the slot's present one.
    fn slot_of(&self, tag: Tag) -> Option<usize> {
        let index = (tag.0 & 0xffff) as usize;
        let slot = self.slots.get(index)?;
        (tag.0 >> 16 == u64::from(slot.generation)).then_some(index)
    }

    /// Writes an SRP_CMD to the start of `out` and returns the length of its header; immediate data
    /// is to follow directly.
    ///
    /// # Panics
    /// If `out` is too short, immediate data was not agreed on, or the tag is not outstanding: the
    /// caller's mistakes, not the peer's.
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

    /// Starts a task-management request and writes it; `None` where one is outstanding already, or
    /// the request limit is used up.
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

    /// Gives up the task-management request; a late answer is [`Received::Stale`].
    pub fn give_up_tsk_mgmt(&mut self) {
        self.tmf = None;
    }

    /// Whether a task-management request is outstanding.
    #[must_use]
    pub fn has_tsk_mgmt(&self) -> bool {
        self.tmf.is_some()
    }

    /// Begins to close: no new requests. Gives the SRP_I_LOGOUT to send where the target would
    /// listen to one.
    pub fn begin_disconnect(&mut self) -> Option<[u8; SHORT_IU_LEN]> {
        let live = self.state == ChannelState::Live;
        if self.state != ChannelState::Disconnected {
            self.state = ChannelState::Disconnecting;
        }
        live.then(|| {
            let mut iu = [0; SHORT_IU_LEN];
            ILogout { tag: Tag(0) }.emit(&mut iu);
            iu
        })
    }

    /// The connection is gone, and with it every outstanding request.
    pub fn handle_disconnected(&mut self) {
        self.state = ChannelState::Disconnected;
    }

    /// Judges an information unit that arrived.
    ///
    /// # Errors
    /// [`ChannelFault`] upon which the channel is to be closed.
    pub fn handle_iu<'a>(&mut self, iu: &'a [u8]) -> Result<Received<'a>, ChannelFault> {
        let message = FromTarget::parse(iu)?;
        if !matches!(self.state, ChannelState::Live | ChannelState::Disconnecting) {
            return Err(ChannelFault::Unexpected {
                opcode: Opcode::of(iu)?,
                state: self.state,
            });
        }
        match message {
            FromTarget::Rsp(rsp) => self.handle_rsp(rsp),
            FromTarget::CredReq(req) => {
                self.add_credit(req.req_lim_delta)?;
                let mut answer = [0; SHORT_IU_LEN];
                CredRsp { tag: req.tag }.emit(&mut answer);
                Ok(Received::Answer(answer))
            }
            FromTarget::AerReq(req) => {
                self.add_credit(req.req_lim_delta)?;
                let mut answer = [0; SHORT_IU_LEN];
                AerRsp { tag: req.tag }.emit(&mut answer);
                Ok(Received::Event {
                    lun: req.lun,
                    sense: req.sense,
                    answer,
                })
            }
            FromTarget::TLogout(logout) => {
                self.state = ChannelState::Disconnecting;
                Ok(Received::Logout(logout.reason))
            }
            FromTarget::LoginRsp(_) | FromTarget::LoginRej(_) => Err(ChannelFault::Unexpected {
                opcode: Opcode::of(iu)?,
                state: self.state,
            }),
        }
    }

    fn handle_rsp<'a>(&mut self, rsp: Rsp<'a>) -> Result<Received<'a>, ChannelFault> {
        if rsp.tag.0 & TMF_TAG != 0 {
            return self.handle_tsk_mgmt_rsp(&rsp);
        }
        let unknown = ChannelFault::UnknownTag(rsp.tag);
        let index = self.slot_of(rsp.tag).ok_or(unknown)?;
        let slot = &mut self.slots[index];
        if slot.owner.is_none() {
            if slot.given_up == Some(slot.generation) {
                slot.given_up = None;
                self.add_credit(rsp.req_lim_delta)?;
                return Ok(Received::Stale);
            }
            return Err(unknown);
        }
        let len = slot.len;
        check_residual(rsp.data_in, if let DataLen::In(n) = len { n } else { 0 })?;
        check_residual(rsp.data_out, if let DataLen::Out(n) = len { n } else { 0 })?;
        let owner = slot.owner.take().expect("seen above");
        slot.given_up = None;
        self.free.push(index as u16);
        self.add_credit(rsp.req_lim_delta)?;
        Ok(Received::Response { owner, rsp })
    }

    fn handle_tsk_mgmt_rsp<'a>(&mut self, rsp: &Rsp<'a>) -> Result<Received<'a>, ChannelFault> {
        let number = rsp.tag.0 & !TMF_TAG;
        if self.tmf == Some(rsp.tag) {
            self.tmf = None;
            self.add_credit(rsp.req_lim_delta)?;
            // No response data means, as for a command, that nothing failed.
            return Ok(Received::TskMgmt(rsp.response.unwrap_or(RspCode::Complete)));
        }
        if number >= 1 && number <= u64::from(self.tmfs) {
            self.add_credit(rsp.req_lim_delta)?;
            return Ok(Received::Stale);
        }
        Err(ChannelFault::UnknownTag(rsp.tag))
    }

    fn add_credit(&mut self, delta: i32) -> Result<(), ChannelFault> {
        let limit = self.req_lim + i64::from(delta);
        if limit.unsigned_abs() > i32::MAX.unsigned_abs().into() {
            return Err(ChannelFault::RequestLimit(delta));
        }
        self.req_lim = limit;
        Ok(())
    }
}

/// An underflow cannot exceed the buffer. An overflow may be anything: it tells what a larger buffer
/// would have got.
fn check_residual(residual: Residual, len: u32) -> Result<(), ChannelFault> {
    match residual {
        Residual::Under(residual) if residual > len => {
            Err(ChannelFault::Residual { residual, len })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "channel_tests.rs"]
mod tests;
