//! Starting a command: its region, the header with its key, and the SEND.

use arrayvec::ArrayVec;
use riser_memory::MemSlice;
use riser_scsi::iser::{Buffers, Header, RemoteBuffer, Stag};
use riser_transport::mr_pool::PooledMr;
use riser_transport::verbs::{Mr, Provider, Sge};

use super::{IserConn, MAX_PIECES};
use crate::engine::rdma::Device;
use crate::iscsi::session::CommandPdu;
use crate::request::{DataLen, RequestId};

impl IserConn {
    /// Starts a command with data in `pieces`, at most [`MAX_PIECES`]; returns false if the
    /// connection is broken. A slot is always free, because the session bounds the number of
    /// commands with outstanding memory.
    ///
    /// The header is encoded manually up to the data segment. The data segment follows in the
    /// gather list, not in our memory, so its length is written to the basic header segment here.
    pub(in crate::engine) fn start<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        request: RequestId,
        command: &CommandPdu,
        len: DataLen,
        pieces: &[MemSlice],
        pool: &Mr,
    ) -> bool {
        let immediate = command.immediate as usize;
        let total: usize = pieces.iter().map(MemSlice::len).sum();
        // No key is needed if all data is immediate.
        let has_key = total > immediate || (total > 0 && matches!(len, DataLen::In(_)));
        let Some(mut new) = self.rdma.allocate_command(request, has_key.into()) else {
            return false;
        };
        if has_key && self.rdma.map(device, &mut new, pieces).is_err() {
            self.rdma.abandon(device, new);
            return false;
        }
        let buffers = advertise(new.regions().first(), len, immediate);
        let mut bhs = command.bhs;
        bhs[4] = (command.ahs.len() / 4) as u8;
        bhs[5..8].copy_from_slice(&command.immediate.to_be_bytes()[1..]);
        self.message.clear();
        self.message
            .extend_from_slice(&Header::Control(buffers).bytes());
        self.message.extend_from_slice(&bhs);
        self.message.extend_from_slice(&command.ahs);
        let at = self.config.command_at(new.slot);
        self.rdma.write(at, &self.message);
        let mut data: ArrayVec<Sge, MAX_PIECES> = ArrayVec::new();
        let mut left = immediate;
        for piece in pieces {
            let here = left.min(piece.len());
            left -= here;
            if here > 0 {
                data.push(Sge {
                    addr: piece.addr(),
                    length: here as u32,
                    lkey: pool.lkey,
                });
            }
        }
        let header = (at, self.message.len());
        self.rdma.post_command(device, new, header, &data, len)
    }
}

/// Returns the buffers of a command for the header. For a write, the buffer starts after the
/// immediate data (TaggedBufferForSolicitedDataOnly).
fn advertise(region: Option<&PooledMr>, len: DataLen, immediate: usize) -> Buffers {
    let Some(remote) = region.map(PooledMr::remote) else {
        return Buffers::default();
    };
    let buffer = |skip: usize| {
        Some(RemoteBuffer {
            stag: Stag(remote.rkey.0),
            base: remote.addr + skip as u64,
        })
    };
    match len {
        DataLen::None => Buffers::default(),
        DataLen::In(_) => Buffers {
            read: buffer(0),
            write: None,
        },
        DataLen::Out(_) => Buffers {
            write: buffer(immediate),
            read: None,
        },
    }
}
