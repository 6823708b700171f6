//! An SRP channel on RDMA: information units, their buffers, and descriptor tables.
//!
//! # Bounds
//! Commands: the channel's queue size. Receives: the queue size plus 8. Send queue: three entries
//! per command, plus the entries of the largest command, one per receive (for its response), and
//! 16. Regions: one per command plus 8, but at least the regions of the largest command. Without
//! free entries or regions, a command is not started, and waits in its session.

mod start;

use std::time::Instant;

use riser_memory::{MemSlice, Memory};
use riser_scsi::srp::{MemDesc, SHORT_IU_LEN, TSK_MGMT_LEN};
use riser_transport::verbs::{Access, Mr, PortSpace, Provider, VerbsError};

use super::io::Target;
use super::rdma::{
    Device, MAX_REGIONS, Owner, RdmaConn, RdmaLimits, RdmaProtocol, Resources, new_memory,
};
use crate::request::RequestId;
use crate::session::ConnectError;
use crate::srp::session::{ChannelIndex, SrpSession};

/// Length of a receive in bytes: the maximum information unit accepted. An SRP_RSP with the longest
/// sense data has 292 bytes.
pub(super) const RECV_LEN: usize = 1024;

/// Receives, send-queue entries and regions in addition to those for commands.
const SPARE: u16 = 8;
/// Maximum number of redirections of a connection request to another port. Ports that refer to each
/// other would redirect it forever.
const MAX_REDIRECTS: u8 = 4;

/// Buffers for task-management requests.
const TSK_MGMT_SLOTS: u16 = 4;

/// Sizes for a channel.
#[derive(Clone, Copy, Debug)]
pub(super) struct SrpConfig {
    pub(super) queue_size: u16,
    pub(super) inline_descriptors: u8,
    pub(super) external_descriptors: u32,
    /// Segments per fast registration.
    pub(super) region_segments: u32,
}

impl SrpConfig {
    fn receives(&self) -> u16 {
        self.queue_size + SPARE
    }

    pub(super) fn limits(&self) -> RdmaLimits {
        let (commands, receives) = (u32::from(self.queue_size), u32::from(self.receives()));
        RdmaLimits {
            commands: self.queue_size,
            command_entries: commands * 3 + 2 * MAX_REGIONS as u32,
            message_entries: receives + 2 * u32::from(SPARE),
            receives,
            regions: usize::from(self.receives()).max(MAX_REGIONS),
            region_segments: self.region_segments,
            memory: self.command_at(self.queue_size),
            remote_invalidate: false,
            redirects: MAX_REDIRECTS,
        }
    }

    fn iu_len(&self) -> usize {
        let longest = 48 + 16 + 20 + usize::from(self.inline_descriptors) * MemDesc::LEN;
        longest.next_multiple_of(64)
    }

    fn table_len(&self) -> usize {
        self.external_descriptors as usize * MemDesc::LEN
    }

    // Memory layout of the connection: receives, responses, task management, logout, commands.
    fn recv_at(slot: u16) -> usize {
        usize::from(slot) * RECV_LEN
    }

    fn response_at(&self, slot: u16) -> usize {
        Self::recv_at(self.receives()) + usize::from(slot) * SHORT_IU_LEN
    }

    fn tsk_mgmt_at(&self, slot: u16) -> usize {
        self.response_at(self.receives()) + usize::from(slot) * TSK_MGMT_LEN
    }

    fn logout_at(&self) -> usize {
        self.tsk_mgmt_at(TSK_MGMT_SLOTS)
    }

    fn command_at(&self, slot: u16) -> usize {
        let first = (self.logout_at() + SHORT_IU_LEN).next_multiple_of(64);
        first + usize::from(slot) * self.iu_len()
    }
}

/// An information unit sent by us that is not a command. It determines the number of the message on
/// the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShortIu {
    /// Response to the message in this receive.
    Reply(u16),
    /// Task management, from this buffer.
    TskMgmt(u16),
    Logout,
}

/// Keys of the data buffer pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataKeys {
    /// Registration of the pool, for immediate data.
    pub(super) pool: Mr,
    /// Pass the pool's remote key to the target instead of a key per command.
    pub(super) pool_wide: bool,
}

/// Result of starting a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// The command was posted.
    Sent,
    /// Other commands use the entries or regions; nothing was posted.
    Starved,
    /// The command must not be sent anymore.
    Dropped,
    /// The command can never be sent.
    Impossible(&'static str),
    /// The connection is broken.
    Broken,
}

/// Reusable buffers.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) slices: Vec<MemSlice>,
    descriptors: Vec<MemDesc>,
    iu: Vec<u8>,
}

/// A command to start.
pub(super) struct StartArgs<'a> {
    pub(super) session: &'a SrpSession,
    pub(super) channel: ChannelIndex,
    pub(super) request: RequestId,
    pub(super) immediate: bool,
    pub(super) keys: &'a DataKeys,
}

/// Connection of a channel, with its information units and descriptor tables.
pub(super) struct SrpConn {
    pub(super) rdma: RdmaConn<MAX_REGIONS>,
    config: SrpConfig,
    /// Descriptor tables readable by the target, one per command.
    tables: Option<(Memory, Mr)>,
    tsk_mgmt_free: Vec<u16>,
}

impl SrpConn {
    /// Starts to resolve the path to the target.
    pub(super) fn resolve<P: Provider>(
        device: &mut Device<P>,
        owner: Owner,
        target: &Target,
        config: SrpConfig,
    ) -> Result<Self, ConnectError> {
        let space = match target.service_id {
            Some(service_id) => PortSpace::Ib {
                service_id,
                mask: u64::MAX,
            },
            None => PortSpace::Tcp,
        };
        Ok(Self {
            rdma: RdmaConn::resolve(device, owner, space, target, config.limits())?,
            config,
            tables: None,
            tsk_mgmt_free: (0..TSK_MGMT_SLOTS).collect(),
        })
    }

    /// Copies a received information unit to `out`.
    pub(super) fn received(&self, slot: u16, out: &mut [u8]) {
        self.rdma.read(SrpConfig::recv_at(slot), out);
    }

    /// Posts a receive; returns false if the connection is broken.
    pub(super) fn post_recv<P: Provider>(&mut self, device: &mut Device<P>, slot: u16) -> bool {
        let at = SrpConfig::recv_at(slot);
        self.rdma.post_recv(device, slot, at, RECV_LEN)
    }

    fn post_short<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        message: ShortIu,
        iu: &[u8],
    ) -> bool {
        let receives = self.config.receives();
        let (number, at) = match message {
            ShortIu::Reply(slot) => (slot, self.config.response_at(slot)),
            ShortIu::TskMgmt(slot) => (receives + slot, self.config.tsk_mgmt_at(slot)),
            ShortIu::Logout => (receives + TSK_MGMT_SLOTS, self.config.logout_at()),
        };
        self.rdma.post_message(device, number, at, iu)
    }

    /// Returns the information unit for the message number.
    pub(super) fn sent(&self, number: u16) -> ShortIu {
        match number.checked_sub(self.config.receives()) {
            None => ShortIu::Reply(number),
            Some(slot) if slot < TSK_MGMT_SLOTS => ShortIu::TskMgmt(slot),
            Some(_) => ShortIu::Logout,
        }
    }

    /// Sends the response to the message in receive `slot`; the receive is posted again after
    /// sending. Returns false if the connection is broken.
    pub(super) fn post_response<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        slot: u16,
        iu: &[u8],
    ) -> bool {
        self.post_short(device, ShortIu::Reply(slot), iu)
    }

    /// Sends a task-management request; returns false if the connection is broken.
    pub(super) fn post_tsk_mgmt<P: Provider>(&mut self, device: &mut Device<P>, iu: &[u8]) -> bool {
        let Some(slot) = self.tsk_mgmt_free.pop() else {
            return false;
        };
        self.post_short(device, ShortIu::TskMgmt(slot), iu)
    }

    /// Frees the buffer of a task-management request after sending.
    pub(super) fn on_tsk_mgmt_sent(&mut self, slot: u16) {
        self.tsk_mgmt_free.push(slot);
    }

    /// Sends the logout; returns false if the connection is broken.
    pub(super) fn post_logout<P: Provider>(&mut self, device: &mut Device<P>, iu: &[u8]) -> bool {
        self.post_short(device, ShortIu::Logout, iu)
    }
}

impl RdmaProtocol<MAX_REGIONS> for SrpConn {
    fn rdma(&self) -> &RdmaConn<MAX_REGIONS> {
        &self.rdma
    }

    fn rdma_mut(&mut self) -> &mut RdmaConn<MAX_REGIONS> {
        &mut self.rdma
    }

    /// This also creates the descriptor tables.
    fn prepare<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        resources: &Resources,
    ) -> Result<bool, VerbsError> {
        let len = self.config.table_len() * usize::from(self.config.queue_size);
        if len > 0 {
            let memory = new_memory(len)?;
            let (pd, access) = (resources.pd, Access::REMOTE_READ);
            let mr = device.provider.reg_mr(pd, &memory.whole(), access)?;
            self.tables = Some((memory, mr));
        }
        Ok((0..self.config.receives()).all(|slot| self.post_recv(device, slot)))
    }

    fn release<P: Provider>(self, device: &mut Device<P>, linger: bool, now: Instant) {
        self.rdma.release(device, linger, now);
        if let Some((_, mr)) = self.tables {
            let _ = device.provider.dereg_mr(mr.id);
        }
    }
}
