//! An SRP channel to a node of a foreign target. Like Linux `ib_srpt`, the target responds to a
//! login while commands of the previous session are still being executed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use riser_scsi::srp::{
    BufferFormats, Cmd, DataBuffer, ImmediateDataOffset, InitiatorPortId, LoginReq, LoginRsp,
    MemDesc, MultiChannelAction, MultiChannelResult, TLogout, TLogoutReason, Tag,
};
use riser_transport::verbs::QpId;

use super::rdma::{RECV_LEN, Remote, Work};
use super::scsi::sense_data;
use super::unit::{Command, Reply, Write};
use super::{Mischief, Traits};

/// SRP_RSP.
const RSP: u8 = 0xc1;

/// A write that is receiving its data.
#[derive(Debug)]
pub(super) struct Gathering {
    pub(super) write: Write,
    pub(super) data: Vec<u8>,
    /// Buffers that were not read yet.
    remaining: VecDeque<MemDesc>,
}

/// Memory for the data of a command.
#[derive(Clone, Debug, Default)]
pub(super) struct Data {
    buffers: Vec<MemDesc>,
    /// The descriptor table, in memory of the initiator.
    table: Option<MemDesc>,
    immediate: Option<Vec<u8>>,
}

impl Data {
    fn of(buffer: &DataBuffer<'_>) -> Self {
        match buffer {
            DataBuffer::None => Self::default(),
            DataBuffer::Direct(one) => Self {
                buffers: vec![*one],
                ..Self::default()
            },
            DataBuffer::Indirect(table) => Self {
                buffers: table.inline.to_vec(),
                table: (!table.is_complete()).then_some(table.table),
                immediate: None,
            },
            DataBuffer::Immediate { data, .. } => Self {
                immediate: Some(data.to_vec()),
                ..Self::default()
            },
        }
    }
}

/// A received command.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) tag: u64,
    pub(super) command: Command,
    is_write: bool,
    data: Data,
}

#[derive(Debug)]
pub(super) struct Channel {
    pub(super) qp: QpId,
    pub(super) number: u64,
    /// Number of the session, which is that of its first channel.
    pub(super) session: u64,
    pub(super) port: InitiatorPortId,
    pub(super) immediate: Option<ImmediateDataOffset>,
    pub(super) output: VecDeque<Work>,
    /// Commands without a response.
    outstanding: BTreeSet<u64>,
    /// Commands that are waiting for their descriptor table.
    waiting: BTreeMap<u64, Received>,
    gathering: BTreeMap<u64, Gathering>,
    /// Buffers of read commands.
    buffers: BTreeMap<u64, Vec<MemDesc>>,
    pub(super) is_over: bool,
}

/// Returns the response to a login.
pub(super) fn login_response(login: &LoginReq, has_others: bool, traits: &Traits) -> Vec<u8> {
    let mut rsp = [0; 52];
    LoginRsp {
        req_lim_delta: traits.window.into(),
        tag: login.tag,
        max_it_iu_len: RECV_LEN as u32,
        max_ti_iu_len: 1024,
        formats: BufferFormats::all(),
        multi_channel: match (login.multi_channel, has_others) {
            (_, false) => MultiChannelResult::NoChannels,
            (MultiChannelAction::Single, true) => MultiChannelResult::Terminated,
            (MultiChannelAction::Multi, true) => MultiChannelResult::Maintained,
        },
        solicited_notification: false,
        immediate: login.immediate.is_some() && traits.immediate,
    }
    .emit(&mut rsp);
    rsp.to_vec()
}

impl Channel {
    pub(super) fn new(
        qp: QpId,
        (number, session): (u64, u64),
        login: &LoginReq,
        traits: &Traits,
    ) -> Self {
        Self {
            qp,
            number,
            session,
            port: login.initiator_port,
            immediate: login.immediate.filter(|_| traits.immediate),
            output: VecDeque::new(),
            outstanding: BTreeSet::new(),
            waiting: BTreeMap::new(),
            gathering: BTreeMap::new(),
            buffers: BTreeMap::new(),
            is_over: false,
        }
    }

    /// Receives a command, and returns it when its buffers are known.
    pub(super) fn receive_command(&mut self, cmd: &Cmd<'_>) -> Option<Received> {
        let is_write = !matches!(cmd.data_out, DataBuffer::None);
        let buffer = if is_write {
            &cmd.data_out
        } else {
            &cmd.data_in
        };
        let command = Command {
            session: self.session,
            cdb: cmd.cdb,
            expected: buffer.data_len(),
            is_counted: false,
            is_connected: true,
        };
        let received = Received {
            tag: cmd.tag.0,
            command,
            is_write,
            data: Data::of(buffer),
        };
        self.outstanding.insert(received.tag);
        match received.data.table {
            None => Some(received),
            Some(table) => {
                self.read(table, received.tag);
                self.waiting.insert(received.tag, received);
                None
            }
        }
    }

    fn read(&mut self, from: MemDesc, token: u64) {
        let remote = Remote {
            addr: from.va(),
            key: from.key(),
        };
        let read = Work::Read(remote, from.data_len() as usize, token);
        self.output.push_back(read);
    }

    /// Keeps the buffers of a read command until it completes.
    pub(super) fn keep_buffers(&mut self, received: &Received) {
        if !received.is_write {
            self.buffers
                .insert(received.tag, received.data.buffers.clone());
        }
    }

    /// Starts to receive the data of a write.
    pub(super) fn gather(&mut self, received: Received, write: Write) {
        let gathering = Gathering {
            write,
            data: received.data.immediate.unwrap_or_default(),
            remaining: received.data.buffers.into(),
        };
        self.gathering.insert(received.tag, gathering);
    }

    /// Returns a write if all its data was received, otherwise reads the next part of the data.
    pub(super) fn continue_write(&mut self, tag: u64) -> Option<Gathering> {
        let next = self.gathering.get_mut(&tag)?.remaining.pop_front();
        match next {
            Some(buffer) => {
                self.read(buffer, tag);
                None
            }
            None => self.gathering.remove(&tag),
        }
    }

    /// Called when an RDMA READ has completed. Returns the command if this was its descriptor
    /// table.
    pub(super) fn on_fetched(&mut self, tag: u64, data: &[u8]) -> Option<Received> {
        let Some(mut received) = self.waiting.remove(&tag) else {
            if let Some(write) = self.gathering.get_mut(&tag) {
                write.data.extend_from_slice(data);
            }
            return None;
        };
        let word = |at: &[u8]| u32::from_be_bytes(at.try_into().expect("four bytes"));
        let buffers = data.chunks_exact(MemDesc::LEN).map(|entry| {
            let addr = u64::from_be_bytes(entry[..8].try_into().expect("eight bytes"));
            MemDesc::new(addr, word(&entry[8..12]), word(&entry[12..16]))
        });
        received.data.buffers = buffers.collect();
        Some(received)
    }

    /// Drops all writes that are receiving data. No response will be sent for these.
    pub(super) fn abort_writes(&mut self) {
        self.gathering.clear();
    }

    /// Queues the data and the response of a command.
    pub(super) fn push_reply(&mut self, tag: u64, reply: &Reply, mischief: Option<Mischief>) {
        if !self.outstanding.remove(&tag) {
            return;
        }
        let mut data = &reply.data[..];
        let buffers = self.buffers.remove(&tag);
        let is_read = buffers.is_some();
        for buffer in buffers.unwrap_or_default() {
            let here = data.len().min(buffer.data_len() as usize);
            let remote = Remote {
                addr: buffer.va(),
                key: buffer.key(),
            };
            if here > 0 {
                let write = Work::Write(remote, data[..here].to_vec());
                self.output.push_back(write);
            }
            data = &data[here..];
        }
        let status = response(tag, 1, reply, is_read);
        match mischief {
            None | Some(Mischief::SkipNumbers) => {}
            Some(Mischief::Repeat) => {
                let repeated = response(tag, 0, reply, is_read);
                self.output.push_back(Work::Send(status.clone()));
                self.output.push_back(Work::Send(repeated));
                return;
            }
            Some(Mischief::Unknown(bits)) => {
                let other = response(tag ^ (bits | 1 << 40), 0, reply, is_read);
                self.output.push_back(Work::Send(other));
            }
        }
        self.output.push_back(Work::Send(status));
    }

    /// Logs the initiator out.
    pub(super) fn log_out(&mut self) {
        let mut iu = [0; 16];
        let logout = TLogout {
            solicited: false,
            reason: TLogoutReason::NoReason,
            tag: Tag(0),
        };
        logout.emit(&mut iu);
        self.output.push_back(Work::Send(iu.to_vec()));
    }

    /// Responds to a task-management function.
    pub(super) fn push_function(&mut self, tag: Tag, task: u64, code: u8) {
        // Credit for the function and for the aborted command.
        let is_aborted = code == 0 && self.outstanding.remove(&task);
        if is_aborted {
            self.gathering.remove(&task);
            self.waiting.remove(&task);
        }
        let mut iu = response(tag.0, 1 + i32::from(is_aborted), &Reply::default(), false);
        iu[18] = 0x01;
        iu[32..36].copy_from_slice(&4_u32.to_be_bytes());
        iu.extend_from_slice(&[0, 0, 0, code]);
        self.output.push_back(Work::Send(iu));
    }
}

/// Encodes SRP_RSP without response data.
fn response(tag: u64, credit: i32, reply: &Reply, is_read: bool) -> Vec<u8> {
    const SENSE_VALID: u8 = 0x02;
    const BUSY: u8 = 0x08;
    let mut iu = vec![0; 36];
    iu[0] = RSP;
    iu[4..8].copy_from_slice(&credit.to_be_bytes());
    iu[8..16].copy_from_slice(&tag.to_be_bytes());
    // SRP has no response code for a command that the target could not execute.
    iu[19] = if reply.is_failure { BUSY } else { reply.status };
    let residual = reply.residual;
    let (over, under, at) = match is_read != residual.is_reverse {
        true => (0x10, 0x20, 24),
        false => (0x04, 0x08, 20),
    };
    iu[18] |= if residual.over { over } else { 0 };
    iu[18] |= if residual.under { under } else { 0 };
    iu[at..at + 4].copy_from_slice(&residual.count.to_be_bytes());
    if let Some(sense) = reply.sense {
        let sense = sense_data(sense);
        iu[18] |= SENSE_VALID;
        iu[28..32].copy_from_slice(&(sense.len() as u32).to_be_bytes());
        iu.extend_from_slice(&sense);
    }
    iu
}
