//! Configuration of a new channel.

use std::sync::Arc;
use std::time::Duration;

use riser_memory::MemSlice;
use riser_scsi::nexus::NexusId;

use super::login::ChannelParams;
use crate::fabric::LunMap;

/// Parameters of a new channel.
#[derive(Debug)]
pub struct ChannelConfig {
    /// Limits of the channel and its rings.
    pub params: ChannelParams,
    /// Worker index.
    pub worker: u16,
    /// Channel number, which is never reused by this worker.
    pub serial: u64,
    /// The I_T nexus of this channel.
    pub nexus: NexusId,
    /// Logical units that the initiator can access.
    pub luns: Arc<LunMap>,
    /// Receive ring: [`ChannelParams::receives`] × [`ChannelParams::receive_stride`] bytes.
    pub receive_ring: MemSlice,
    /// Send ring: [`ChannelParams::sends`] × [`ChannelParams::send_stride`] bytes.
    pub send_ring: MemSlice,
    /// Maximum number of scatter-gather entries per send request.
    pub max_sge: usize,
    /// Timeout for solicited data.
    pub data_out_timeout: Duration,
}
