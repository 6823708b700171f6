//! One iSCSI connection on RDMA (RFC 7145): receives, message buffers, commands.
//!
//! A PDU is one SEND: an iSER header that names the command's buffer, the PDU, and its immediate
//! data, which are gathered from where they lie. Other data move by themselves: the target reads
//! them, or writes them, by the key in the header.
//!
//! # Memory
//! A command's buffer is one region of the connection ([`RdmaConn`]). Its key ends with the
//! target's answer, where both sides offered that (SEND with invalidate), or else by an
//! invalidation of ours.
//!
//! # Bounds
//! Commands: the queue size. Receives: that and [`SPARE`] more of [`RING_LEN`] bytes in
//! full-feature phase of a normal session, [`LARGE`] of [`LARGE_LEN`] bytes before and in
//! discovery. Regions: one for each command. Send queue: three entries for each command, and one
//! for each control message. A control message that finds no buffer waits in a queue, whose bound
//! is the session's.

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

/// Length of a message buffer for control PDUs that are sent or received during login and discovery.
const LARGE_LEN: usize = HEADERS + ISER_TEXT as usize;

/// Number of such receives, and of message buffers for sending.
const LARGE: u16 = 4;

/// Length of a receive in full-feature phase.
const RING_LEN: usize = HEADERS + ISER_RECV as usize;

/// Receives beyond those of the commands: pings, task management, and what the target sends
/// unasked.
const SPARE: u16 = 16;

/// Pieces that a command's memory may have: those of its immediate data go into the SEND.
pub(super) const MAX_PIECES: usize = MAX_SEND_SGE - 1;

/// Sizes of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct IserConfig {
    pub(super) queue_size: u16,
    /// Segments of one fast registration.
    pub(super) region_segments: u32,
    /// The session is one of discovery, so large PDUs go on.
    pub(super) discovery: bool,
    /// The device reports which key a SEND has invalidated.
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
        }
    }

    /// The offer in our private data.
    pub(super) fn offer(self) -> CmHeader {
        CmHeader {
            zero_based: false,
            remote_invalidate: self.remote_invalidate,
        }
    }

    // Layout of the connection's memory: receives, control messages, commands.
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

/// A connection, from the first call of the connection manager on.
pub(super) struct IserConn {
    pub(super) rdma: RdmaConn<1>,
    config: IserConfig,
    control_free: Vec<u16>,
    /// Control PDUs that wait for a buffer. Bound: [`MAX_CONTROLS`].
    waiting: VecDeque<ControlPdu>,
    message: Vec<u8>,
}

impl IserConn {
    /// Begins to find the path to the target.
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

    /// Posts the receives of full-feature phase; false if the connection is broken. A discovery
    /// session keeps the ones of its login: shorter receives would be filled first.
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

    /// Copies a received message out.
    pub(super) fn received(&self, slot: u16, len: u32, out: &mut Vec<u8>) {
        let (at, room) = IserConfig::recv_at(slot);
        out.clear();
        out.resize((len as usize).min(room), 0);
        self.rdma.read(at, out);
    }

    /// Posts a receive again, if it is of the kind that is used now; false if the connection is
    /// broken.
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

    /// Sends a control PDU, or keeps it until there is a buffer; false if the connection is broken,
    /// or too many are kept.
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

    /// A control PDU has been sent from buffer `slot`; false if the connection is broken.
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
