//! Sizes of a connection, known before it is accepted.

use std::time::Duration;

use riser_scsi::iscsi::frame::MAX_AHS;
use riser_scsi::iser::HEADERS_LEN;

use super::ring::{LARGE, LARGE_SLOTS, SMALL};
use crate::config::DATA_OUT_TIMEOUT;
use crate::fabric::ConnectionMemory;
use crate::iscsi::ChannelConfig;

/// TargetRecvDataSegmentLength that we offer, in bytes: what Linux and LIO agree on.
pub const RECV_SEGMENT: u32 = 8192;

/// FirstBurstLength that we offer, in bytes. A short write comes with its command, in one message;
/// what is longer is better read by RDMA than sent in pieces that each need a receive.
pub const FIRST_BURST: u32 = 8192;

/// Receives for immediate requests.
const IMMEDIATE: u32 = 16;

/// Receives for PDUs that no window counts otherwise: MaxOutstandingUnexpectedPDUs.
const UNEXPECTED: u32 = 16;

/// Transmit descriptors beyond those of the command window: answers to immediate requests, pings,
/// asynchronous messages.
const SPARE_SENDS: u32 = 16;

/// The drain marker's place in the send queue.
const RESERVED: u32 = 1;

/// Everything about a connection that is fixed before it is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IserParams {
    /// Commands at once: the window.
    pub commands: u16,
    /// Longest data segment received, in bytes.
    pub recv_segment: u32,
    /// Unsolicited data of a command at most, in bytes.
    pub first_burst: u32,
    /// Work requests of the send queue.
    pub send_queue: u32,
    /// Scatter-gather entries of a work request.
    pub max_sge: usize,
    /// RDMA READs at once, as reported to an initiator that asks.
    pub reads: u16,
    /// Answers may invalidate the initiator's keys.
    pub remote_invalidate: bool,
    /// Time limit for data that the initiator is asked for.
    pub data_out_timeout: Duration,
}

impl IserParams {
    /// Limits for a window of `commands`.
    #[must_use]
    pub fn new(commands: u16) -> Self {
        Self {
            commands,
            recv_segment: RECV_SEGMENT,
            first_burst: FIRST_BURST,
            send_queue: 512,
            max_sge: 8,
            reads: 16,
            remote_invalidate: false,
            data_out_timeout: DATA_OUT_TIMEOUT,
        }
    }

    /// Unexpected PDUs that the initiator may have outstanding (RFC 7145 6.7).
    #[must_use]
    pub fn unexpected(&self) -> u32 {
        IMMEDIATE + UNEXPECTED
    }

    /// Receive descriptors: commands, their unsolicited data PDUs, and what is unexpected.
    #[must_use]
    pub fn receives(&self) -> u32 {
        let data_outs = self.first_burst.div_ceil(self.recv_segment);
        u32::from(self.commands) * (1 + data_outs) + self.unexpected()
    }

    /// Longest message received, in bytes.
    #[must_use]
    pub fn receive_len(&self) -> usize {
        HEADERS_LEN + MAX_AHS + (self.recv_segment as usize).next_multiple_of(4)
    }

    /// Bytes from one receive descriptor to the next.
    #[must_use]
    pub fn receive_stride(&self) -> usize {
        self.receive_len().next_multiple_of(64)
    }

    /// Transmit descriptors of the small kind.
    #[must_use]
    pub fn sends(&self) -> u32 {
        (u32::from(self.commands) + SPARE_SENDS).min(self.send_queue)
    }

    /// Work requests that chains may have under way.
    #[must_use]
    pub fn credits(&self) -> u32 {
        self.send_queue - RESERVED
    }

    /// Returns the memory of a connection with these parameters, when it has as many commands as
    /// it may.
    #[must_use]
    pub fn memory(&self) -> ConnectionMemory {
        ConnectionMemory {
            receive_ring: self.receives() as usize * self.receive_stride(),
            send_ring: self.sends() as usize * SMALL + LARGE_SLOTS * LARGE,
            contexts: self.channel_config(0, 0).memory(),
            queues: ConnectionMemory::of_queues(self.send_queue, self.receives()),
        }
    }

    /// Returns the parameters of its channel.
    #[must_use]
    pub fn channel_config(&self, worker: u16, serial: u64) -> ChannelConfig {
        ChannelConfig {
            worker,
            serial,
            commands: self.commands,
            data_out_timeout: self.data_out_timeout,
        }
    }
}
