//! Starting a command: regions, descriptors, the information unit, the chain of work requests.

use arrayvec::ArrayVec;
use riser_memory::MemSlice;
use riser_scsi::srp::{IndirectTable, MemDesc};
use riser_transport::verbs::{Access, Provider, SendFlags, SendOp, SendWr, Sge};
use zerocopy::IntoBytes;

use super::{Attempt, Conn, MAX_REGIONS, MAX_SEND_SGE, Scratch, Start, StartArgs, Work};
use crate::request::DataLen;
use crate::srp::channel::CommandData;
use crate::srp::descriptor::{Placement, Segment, plan_descriptors, plan_placement};

impl Conn {
    /// Starts a command whose data lies in `scratch.slices`.
    pub(in crate::engine) fn start<P: Provider>(
        &mut self,
        provider: &mut P,
        args: &StartArgs<'_>,
        scratch: &mut Scratch,
    ) -> Start {
        let Some(agreed) = args.session.agreed(args.channel).copied() else {
            return Start::Dropped;
        };
        let immediate = args.immediate && scratch.slices.len() < MAX_SEND_SGE;
        let per_region = self.config.region_segments.max(1) as usize;
        let regions = if immediate || args.keys.pool_wide {
            0
        } else {
            scratch.slices.len().div_ceil(per_region)
        };
        if regions > MAX_REGIONS {
            return Start::Impossible("buffer is in too many pieces");
        }
        let entries = 2 * regions as u32 + 1;
        let Some(rings) = &mut self.rings else {
            return Start::Broken;
        };
        if self.free.is_empty() || self.entries < entries || rings.regions.available() < regions {
            return Start::Starved;
        }
        let slot = self.free.pop().expect("not empty");
        let mut attempt = Attempt {
            request: args.request,
            regions: ArrayVec::new(),
            entries,
            sent: false,
            retiring: false,
            pending: 0,
        };
        scratch.descriptors.clear();
        if regions > 0 {
            for pieces in scratch.slices.chunks(per_region) {
                let mut region = rings.regions.get().expect("as many as counted");
                let mapped = region.map(provider, pieces);
                let remote = region.remote();
                attempt.regions.push(region);
                if mapped.is_err() {
                    self.abandon(provider, slot, attempt);
                    return Start::Impossible("device refused to register the buffer");
                }
                let segment = Segment {
                    va: remote.addr,
                    key: remote.rkey.0,
                    len: remote.len.into(),
                };
                plan_descriptors([segment], u32::MAX, &mut scratch.descriptors);
            }
        } else if !immediate {
            let segments = scratch.slices.iter().map(|slice| Segment {
                va: slice.addr(),
                key: args.keys.pool.rkey.0,
                len: slice.len() as u64,
            });
            plan_descriptors(segments, u32::MAX, &mut scratch.descriptors);
        }
        let count = scratch.descriptors.len();
        let Ok(placement) = plan_placement(count, agreed.descriptors) else {
            self.abandon(provider, slot, attempt);
            return Start::Impossible("buffer needs more descriptors than the target takes");
        };
        let Some(header) = self.write_command(slot, args, placement, immediate, scratch) else {
            self.abandon(provider, slot, attempt);
            return Start::Dropped;
        };
        self.entries -= entries;
        let posted = self.post_command(provider, slot, header, args, &mut attempt, &scratch.slices);
        self.set_slot(args.request, Some(slot));
        self.attempts[usize::from(slot)] = Some(attempt);
        if posted { Start::Sent } else { Start::Broken }
    }

    /// Gives back what an attempt took that was never posted.
    fn abandon<P: Provider>(&mut self, provider: &mut P, slot: u16, attempt: Attempt) {
        self.free.push(slot);
        if let Some(rings) = &mut self.rings {
            for region in attempt.regions {
                let _ = rings.regions.put(provider, region);
            }
        }
    }

    /// Writes the information unit (and the table) into the slot's memory; gives its length.
    fn write_command(
        &self,
        slot: u16,
        args: &StartArgs<'_>,
        placement: Placement,
        immediate: bool,
        scratch: &mut Scratch,
    ) -> Option<usize> {
        let rings = self.rings.as_ref()?;
        let descriptors = scratch.descriptors.as_slice();
        let total: u64 = descriptors.iter().map(|d| u64::from(d.data_len())).sum();
        let table_bytes = (descriptors.len() * MemDesc::LEN) as u32;
        let data = match placement {
            _ if immediate => CommandData::Immediate,
            Placement::None => CommandData::None,
            Placement::Direct => CommandData::Direct(descriptors[0]),
            Placement::Inline => CommandData::Indirect(IndirectTable {
                table: MemDesc::new(0, 0, table_bytes),
                len: total as u32,
                inline: descriptors,
            }),
            Placement::External { inline } => {
                let (memory, mr) = rings.tables.as_ref()?;
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
        rings
            .memory
            .write(self.command_at(slot), &scratch.iu[..header]);
        Some(header)
    }

    /// Posts registrations and the SEND as one chain.
    fn post_command<P: Provider>(
        &mut self,
        provider: &mut P,
        slot: u16,
        header: usize,
        args: &StartArgs<'_>,
        attempt: &mut Attempt,
        slices: &[MemSlice],
    ) -> bool {
        let at = self.command_at(slot);
        let Some(rings) = &self.rings else {
            return false;
        };
        let spec = args.session.spec(args.request);
        let access = match spec.len {
            DataLen::In(_) => Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            _ => Access::REMOTE_READ,
        };
        let mut sges: ArrayVec<Sge, MAX_SEND_SGE> = ArrayVec::new();
        sges.push(Sge {
            addr: rings.mr.addr + at as u64,
            length: header as u32,
            lkey: rings.mr.lkey,
        });
        let with_data = attempt.regions.is_empty() && args.immediate && slices.len() < MAX_SEND_SGE;
        if with_data {
            sges.extend(slices.iter().map(|slice| Sge {
                addr: slice.addr(),
                length: slice.len() as u32,
                lkey: args.keys.pool.lkey,
            }));
        }
        let mut chain: ArrayVec<SendWr<'_>, { MAX_REGIONS + 1 }> = ArrayVec::new();
        for region in &mut attempt.regions {
            chain.push(region.reg_wr(Work::Register(slot).id(), access));
        }
        // With regions the invalidations tell when the SEND is over.
        let flags = if attempt.regions.is_empty() {
            SendFlags::SIGNALED
        } else {
            SendFlags::empty()
        };
        chain.push(SendWr {
            wr_id: Work::Command(slot).id(),
            op: SendOp::Send,
            sges: &sges,
            flags,
            ud: None,
        });
        provider.post_send(rings.qp, &chain).is_ok()
    }
}
