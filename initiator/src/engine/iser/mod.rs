//! An iSCSI connection on RDMA (RFC 7145): receives, message buffers and commands.
//!
//! Each PDU is a single SEND: an iSER header with the command's buffer, the PDU, and its immediate
//! data, which is gathered in place. The target transfers all other data with RDMA READ and WRITE,
//! using the key in the header.
//!
//! # Memory
//! The buffer of a command is a single region of the connection ([`RdmaConn`]). Its key is
//! invalidated by the target's response (SEND with invalidate) if both sides support this, or
//! otherwise by us.
//!
//! # Bounds
//! Commands: the queue size. Receives: the queue size plus [`SPARE`], each of [`RING_LEN`] bytes,
//! in the full-feature phase of a normal session; [`LARGE`], each of [`LARGE_LEN`] bytes, during
//! login and in discovery sessions. Regions: one per command. Send queue: three entries per command
//! and one per control message. A control message without a free buffer waits in a queue bounded by
//! the session.

mod start;

use std::collections::VecDeque;
use std::time::Instant;

use riser_scsi::iscsi::frame::MAX_AHS;
use riser_scsi::iser::{Buffers, CmHeader, put_control};
use riser_transport::verbs::{PortSpace, Provider, VerbsError};

use super::io::Target;
use super::rdma::{Device, MAX_SEND_SGE, Owner, RdmaConn, RdmaLimits, RdmaProtocol, Resources};
use crate::iscsi::session::{ControlPdu, MAX_CONTROLS};
use crate::iscsi::{ISER_RECV, ISER_TEXT};
use crate::session::ConnectError;

/// Headers before a data segment, in bytes.
const HEADERS: usize = 28 + 48;

/// Length of a message buffer for control PDUs sent or received during login and discovery.
const LARGE_LEN: usize = HEADERS + ISER_TEXT as usize;

/// Number of these receives, and of message buffers for sending.
const LARGE: u16 = 4;

/// Length of a receive in the full-feature phase.
const RING_LEN: usize = HEADERS + ISER_RECV as usize;

/// Receives in addition to those for commands: for pings, task management, and unsolicited PDUs of
/// the target.
const SPARE: u16 = 16;

/// Maximum number of segments in a command's memory; the segments of its immediate data are part of
/// the SEND.
pub(super) const MAX_PIECES: usize = MAX_SEND_SGE - 1;

/// Sizes for a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct IserConfig {
    pub(super) queue_size: u16,
    /// Segments per fast registration.
    pub(super) region_segments: u32,
    /// Discovery session: large PDUs continue after the login.
    pub(super) discovery: bool,
    /// The device reports which key a SEND with invalidate has invalidated.
    pub(super) remote_invalidate: bool,
}

impl IserConfig {
    fn receives(self) -> u16 {
        LARGE + self.queue_size + SPARE
    }

    pub(super) fn limits(self) -> RdmaLimits {
        RdmaLimits {
            commands: self.queue_size,
            command_entries: u32::from(self.queue_size) * 3,
            message_entries: LARGE.into(),
            receives: self.receives().into(),
            regions: self.queue_size.into(),
            region_segments: self.region_segments,
            memory: self.command_at(self.queue_size),
            remote_invalidate: true,
            // An iSCSI login is redirected by the target itself.
            redirects: 0,
        }
    }

    /// Returns the offer for our private data.
    pub(super) fn offer(self) -> CmHeader {
        CmHeader {
            zero_based: false,
            remote_invalidate: self.remote_invalidate,
        }
    }

    // Memory layout of the connection: receives, control messages, commands.
    fn recv_at(slot: u16) -> (usize, usize) {
        match slot.checked_sub(LARGE) {
            None => (usize::from(slot) * LARGE_LEN, LARGE_LEN),
            Some(small) => (
                usize::from(LARGE) * LARGE_LEN + usize::from(small) * RING_LEN,
                RING_LEN,
            ),
        }
    }

    fn control_at(self, slot: u16) -> usize {
        Self::recv_at(self.receives()).0 + usize::from(slot) * LARGE_LEN
    }

    fn command_at(self, slot: u16) -> usize {
        self.control_at(LARGE) + usize::from(slot) * (HEADERS + MAX_AHS)
    }
}

/// A connection, starting with the first call to the connection manager.
pub(super) struct IserConn {
    pub(super) rdma: RdmaConn<1>,
    config: IserConfig,
    control_free: Vec<u16>,
    /// Control PDUs waiting for a buffer. Bound: [`MAX_CONTROLS`].
    waiting: VecDeque<ControlPdu>,
    message: Vec<u8>,
}

impl IserConn {
    /// Starts to resolve the path to the target.
    pub(super) fn resolve<P: Provider>(
        device: &mut Device<P>,
        owner: Owner,
        target: &Target,
        config: IserConfig,
    ) -> Result<Self, ConnectError> {
        let limits = config.limits();
        Ok(Self {
            rdma: RdmaConn::resolve(device, owner, PortSpace::Tcp, target, limits)?,
            config,
            control_free: (0..LARGE).rev().collect(),
            waiting: VecDeque::new(),
            message: Vec::new(),
        })
    }

    /// Posts the receives for the full-feature phase; returns false if the connection is broken. A
    /// discovery session keeps the receives of the login, because shorter ones would be filled
    /// first.
    pub(super) fn enter_full_feature<P: Provider>(&mut self, device: &mut Device<P>) -> bool {
        let receives = LARGE..self.config.receives();
        self.config.discovery || self.post_recvs(device, receives)
    }

    fn post_recvs<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        mut slots: std::ops::Range<u16>,
    ) -> bool {
        slots.all(|slot| self.post_recv(device, slot))
    }

    /// Copies a received message to `out`.
    pub(super) fn received(&self, slot: u16, len: u32, out: &mut Vec<u8>) {
        let (at, room) = IserConfig::recv_at(slot);
        out.clear();
        out.resize((len as usize).min(room), 0);
        self.rdma.read(at, out);
    }

    /// Reposts a receive if this kind is currently used; returns false if the connection is broken.
    pub(super) fn repost<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        slot: u16,
        is_full_feature: bool,
    ) -> bool {
        let is_large = slot < LARGE;
        if is_large && is_full_feature && !self.config.discovery {
            return true;
        }
        self.post_recv(device, slot)
    }

    fn post_recv<P: Provider>(&mut self, device: &mut Device<P>, slot: u16) -> bool {
        let (at, len) = IserConfig::recv_at(slot);
        self.rdma.post_recv(device, slot, at, len)
    }

    /// Sends a control PDU, or queues it until a buffer is free. Returns false if the connection is
    /// broken or too many PDUs are queued.
    pub(super) fn send_control<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        pdu: ControlPdu,
    ) -> bool {
        if self.waiting.len() == MAX_CONTROLS {
            return false;
        }
        self.waiting.push_back(pdu);
        self.feed_controls(device)
    }

    fn feed_controls<P: Provider>(&mut self, device: &mut Device<P>) -> bool {
        while !self.waiting.is_empty() {
            let Some(slot) = self.control_free.pop() else {
                return true;
            };
            let pdu = self.waiting.pop_front().expect("not empty");
            if pdu.data.len() > ISER_TEXT as usize {
                return false;
            }
            self.message.clear();
            let data = &pdu.data;
            put_control(Buffers::default(), pdu.bhs, &[], data, &mut self.message);
            let at = self.config.control_at(slot);
            if !self.rdma.post_message(device, slot, at, &self.message) {
                return false;
            }
        }
        true
    }

    /// Called when the control PDU in buffer `slot` was sent; returns false if the connection is
    /// broken.
    pub(super) fn on_control_sent<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        slot: u16,
    ) -> bool {
        self.control_free.push(slot);
        self.feed_controls(device)
    }
}

impl RdmaProtocol<1> for IserConn {
    fn rdma(&self) -> &RdmaConn<1> {
        &self.rdma
    }

    fn rdma_mut(&mut self) -> &mut RdmaConn<1> {
        &mut self.rdma
    }

    fn prepare<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        _resources: &Resources,
    ) -> Result<bool, VerbsError> {
        Ok(self.post_recvs(device, 0..LARGE))
    }

    fn release<P: Provider>(self, device: &mut Device<P>, linger: bool, now: Instant) {
        self.rdma.release(device, linger, now);
    }
}
