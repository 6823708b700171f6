//! Starting a command: regions, descriptors, the information unit, and the chain of work requests.

use arrayvec::ArrayVec;
use riser_scsi::srp::{IndirectTable, MemDesc};
use riser_transport::verbs::{Provider, Sge, VerbsError};
use zerocopy::IntoBytes;

use super::{Scratch, SrpConn, Start, StartArgs};
use crate::engine::rdma::{Device, MAX_REGIONS, MAX_SEND_SGE};
use crate::srp::channel::CommandData;
use crate::srp::descriptor::{DescriptorLayout, Segment, plan_descriptors, plan_layout};

impl SrpConn {
    /// Starts a command with data in `scratch.slices`.
    ///
    /// All fallible steps precede posting the chain, so a command that cannot be started has no
    /// effect on the connection.
    pub(in crate::engine) fn start<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        args: &StartArgs<'_>,
        scratch: &mut Scratch,
    ) -> Start {
        let Some(agreed) = args.session.agreed(args.channel).copied() else {
            return Start::Dropped;
        };
        let immediate = args.immediate && scratch.slices.len() < MAX_SEND_SGE;
        let per_region = self.config.region_segments.max(1) as usize;
        // Immediate data is part of the SEND, and the pool has its own key: neither is registered.
        let regions = match immediate || args.keys.pool_wide {
            true => 0,
            false => scratch.slices.len().div_ceil(per_region),
        };
        if regions > MAX_REGIONS {
            return Start::Impossible("buffer has too many pieces");
        }
        let Some(mut new) = self.rdma.allocate_command(args.request, regions) else {
            return Start::Starved;
        };
        scratch.descriptors.clear();
        if regions > 0 {
            for pieces in scratch.slices.chunks(per_region) {
                if let Err(error) = self.rdma.map(device, &mut new, pieces) {
                    self.rdma.abandon(device, new);
                    return match error {
                        VerbsError::InvalidParameter(_) => {
                            Start::Impossible("device cannot register the buffer")
                        }
                        // A temporary lack of resources, as for a rejected post: the command is
                        // retried on another connection.
                        error => {
                            tracing::warn!(
                                %error,
                                "the device cannot register a buffer; closing the connection"
                            );
                            Start::Broken
                        }
                    };
                }
            }
            let segments = new.regions().iter().map(|region| {
                let remote = region.remote();
                Segment {
                    va: remote.addr,
                    key: remote.rkey.0,
                    len: remote.len.into(),
                }
            });
            plan_descriptors(segments, u32::MAX, &mut scratch.descriptors);
        } else if !immediate {
            let segments = scratch.slices.iter().map(|slice| Segment {
                va: slice.addr(),
                key: args.keys.pool.rkey.0,
                len: slice.len() as u64,
            });
            plan_descriptors(segments, u32::MAX, &mut scratch.descriptors);
        }
        let count = scratch.descriptors.len();
        let Ok(layout) = plan_layout(count, agreed.descriptors) else {
            self.rdma.abandon(device, new);
            return Start::Impossible("buffer needs more descriptors than the target accepts");
        };
        let Some(header) = self.write_command(new.slot, args, layout, immediate, scratch) else {
            self.rdma.abandon(device, new);
            return Start::Dropped;
        };
        let mut data: ArrayVec<Sge, { MAX_SEND_SGE - 1 }> = ArrayVec::new();
        if immediate {
            data.extend(scratch.slices.iter().map(|slice| Sge {
                addr: slice.addr(),
                length: slice.len() as u32,
                lkey: args.keys.pool.lkey,
            }));
        }
        let len = args.session.spec(args.request).len;
        let header = (self.config.command_at(new.slot), header);
        match self.rdma.post_command(device, new, header, &data, len) {
            true => Start::Sent,
            false => Start::Broken,
        }
    }

    /// Writes the information unit and the table to the slot's memory; returns the length of the
    /// information unit.
    fn write_command(
        &self,
        slot: u16,
        args: &StartArgs<'_>,
        layout: DescriptorLayout,
        immediate: bool,
        scratch: &mut Scratch,
    ) -> Option<usize> {
        let descriptors = scratch.descriptors.as_slice();
        let total: u64 = descriptors.iter().map(|d| u64::from(d.data_len())).sum();
        let table_bytes = (descriptors.len() * MemDesc::LEN) as u32;
        let data = match layout {
            _ if immediate => CommandData::Immediate,
            DescriptorLayout::None => CommandData::None,
            DescriptorLayout::Direct => CommandData::Direct(descriptors[0]),
            DescriptorLayout::Inline => CommandData::Indirect(IndirectTable {
                table: MemDesc::new(0, 0, table_bytes),
                len: total as u32,
                inline: descriptors,
            }),
            DescriptorLayout::External { inline } => {
                let (memory, mr) = self.tables.as_ref()?;
                // Each slot has a separate table, because the target may read it until the command
                // completes.
                let at = usize::from(slot) * self.config.table_len();
                memory.write(at, descriptors.as_bytes());
                CommandData::Indirect(IndirectTable {
                    table: MemDesc::new(mr.addr + at as u64, mr.rkey.0, table_bytes),
                    len: total as u32,
                    inline: &descriptors[..usize::from(inline)],
                })
            }
        };
        scratch.iu.resize(self.config.iu_len(), 0);
        let header = args
            .session
            .emit_command(args.request, data, &mut scratch.iu)?;
        let at = self.config.command_at(slot);
        self.rdma.write(at, &scratch.iu[..header]);
        Some(header)
    }
}
