//! Connection sizes, known before a connection is accepted.

use std::time::Duration;

use riser_scsi::iscsi::frame::MAX_AHS;
use riser_scsi::iser::HEADERS_LEN;

use super::ring::{LARGE, LARGE_SLOTS, SMALL};
use crate::config::DATA_OUT_TIMEOUT;
use crate::fabric::ConnectionMemory;
use crate::iscsi::ChannelConfig;

/// TargetRecvDataSegmentLength to offer, in bytes. Linux and LIO negotiate this value.
pub const RECV_SEGMENT: u32 = 8192;

/// FirstBurstLength to offer, in bytes. Data of a short write is sent in the same message as the
/// command. An RDMA READ is more efficient for longer data than several PDUs, because each requires
/// a receive.
pub const FIRST_BURST: u32 = 8192;

/// Number of receives for immediate requests.
const IMMEDIATE: u32 = 16;

/// Number of receives for PDUs outside the command window: MaxOutstandingUnexpectedPDUs.
const UNEXPECTED: u32 = 16;

/// Number of transmit descriptors in addition to the command window: for responses to immediate
/// requests, pings, and asynchronous messages.
const SPARE_SENDS: u32 = 16;

/// Send-queue slots reserved for the drain marker.
const RESERVED: u32 = 1;

/// Connection parameters, which are fixed before the connection is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IserParams {
    /// Command window: maximum number of concurrent commands.
    pub commands: u16,
    /// Maximum data segment length to receive, in bytes.
    pub recv_segment: u32,
    /// Maximum length of unsolicited data for a command, in bytes.
    pub first_burst: u32,
    /// Number of work requests in the send queue.
    pub send_queue: u32,
    /// Number of scatter-gather entries in a work request.
    pub max_sge: usize,
    /// Number of concurrent RDMA READs, as reported to an initiator on request.
    pub reads: u16,
    /// Responses may invalidate STags of the initiator.
    pub remote_invalidate: bool,
    /// Time limit for solicited data of the initiator.
    pub data_out_timeout: Duration,
}

impl IserParams {
    /// Returns the parameters for a window of `commands`.
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

    /// Returns the maximum number of unexpected PDUs that the initiator may have outstanding (RFC
    /// 7145 6.7).
    #[must_use]
    pub fn unexpected(&self) -> u32 {
        IMMEDIATE + UNEXPECTED
    }

    /// Returns the number of receive descriptors: for commands, their unsolicited data PDUs, and
    /// unexpected PDUs.
    #[must_use]
    pub fn receives(&self) -> u32 {
        let data_outs = self.first_burst.div_ceil(self.recv_segment);
        u32::from(self.commands) * (1 + data_outs) + self.unexpected()
    }

    /// Returns the maximum length of a received message in bytes.
    #[must_use]
    pub fn receive_len(&self) -> usize {
        HEADERS_LEN + MAX_AHS + (self.recv_segment as usize).next_multiple_of(4)
    }

    /// Returns the distance between receive descriptors in bytes.
    #[must_use]
    pub fn receive_stride(&self) -> usize {
        self.receive_len().next_multiple_of(64)
    }

    /// Returns the number of small transmit descriptors.
    #[must_use]
    pub fn sends(&self) -> u32 {
        (u32::from(self.commands) + SPARE_SENDS).min(self.send_queue)
    }

    /// Returns the number of work requests that chains can use at the same time.
    #[must_use]
    pub fn credits(&self) -> u32 {
        self.send_queue - RESERVED
    }

    /// Returns the memory usage of a connection with these parameters, for its maximum number of
    /// commands.
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
