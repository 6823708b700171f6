//! Descriptor tables: the location of a command's data in the initiator's memory.
//!
//! A direct descriptor or a short indirect table is stored in the context of the command. A longer
//! table, or an external table that must be read from the initiator first, is stored in a pool
//! buffer, so that the memory of a channel does not depend on its peer.

use arrayvec::ArrayVec;
use riser_scsi::access::DataAccess;
use riser_scsi::srp::{Cmd, DataBuffer, MemDesc};
use riser_transport::verbs::RKey;
use zerocopy::{FromZeros, IntoBytes};

use crate::fabric::{Descriptors, Direction, RemoteMemory, RemoteRange};
use crate::pool::{Buffer, Owner, Pool};

/// Maximum number of descriptors without a pool buffer.
pub const INLINE_DESCRIPTORS: usize = 16;

/// Maximum number of descriptors in a table.
pub const MAX_DESCRIPTORS: u32 = 2048;

/// An ordered list of ranges in the initiator's memory.
#[derive(Debug, Default)]
pub enum Table {
    /// No data in this direction.
    #[default]
    Empty,
    /// A small number of descriptors, stored in the context of the command.
    Inline(ArrayVec<MemDesc, INLINE_DESCRIPTORS>),
    /// Descriptors in a pool buffer.
    Pooled {
        /// The descriptors as received.
        buffer: Buffer,
        /// Number of descriptors.
        entries: u32,
    },
    /// The command only contains the address of the descriptors.
    External {
        /// The location of the descriptors in the initiator's memory.
        remote: MemDesc,
        /// Total length of the data in bytes.
        data_len: u32,
    },
}

/// The reason why the descriptors of a command are invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// There are more than [`MAX_DESCRIPTORS`] descriptors.
    #[error("too many descriptors: {0}")]
    TooLong(u32),
    /// The descriptors are for less data than the length in the command.
    #[error("descriptors for only {described} of {declared} bytes")]
    Short {
        /// Total length of the descriptors.
        described: u64,
        /// Length in the command, in bytes.
        declared: u32,
    },
}

impl Table {
    /// Stores the descriptors for one direction of a command in an empty table. Returns `false` if
    /// there is no room in the pool.
    ///
    /// # Errors
    /// [`TableError`]. No resources are held in this case.
    pub fn store_descriptors(
        &mut self,
        data: &DataBuffer<'_>,
        pool: &mut Pool,
        owner: Owner,
    ) -> Result<bool, TableError> {
        match data {
            DataBuffer::None | DataBuffer::Immediate { .. } => {}
            DataBuffer::Direct(desc) => self.set_inline(&[*desc]),
            DataBuffer::Indirect(table) => {
                // Check this before allocating memory, because the number is chosen by the peer.
                let entries = table.entries();
                if entries > MAX_DESCRIPTORS {
                    return Err(TableError::TooLong(entries));
                }
                if !table.is_complete() {
                    *self = Self::External {
                        remote: table.table,
                        data_len: table.len,
                    };
                    return Ok(true);
                }
                // Without this check, a transfer could continue beyond the last descriptor.
                check_sum(table.inline.iter(), table.len)?;
                if table.inline.len() <= INLINE_DESCRIPTORS {
                    self.set_inline(table.inline);
                } else {
                    let bytes = table.inline.as_bytes();
                    let Some(buffer) = pool.take_table(owner, bytes.len() as u32) else {
                        return Ok(false);
                    };
                    buffer.write(0, bytes);
                    *self = Self::Pooled { buffer, entries };
                }
            }
        }
        Ok(true)
    }

    fn inline(descs: impl IntoIterator<Item = MemDesc>) -> Self {
        Self::Inline(descs.into_iter().collect())
    }

    /// Stores descriptors in an empty table. The list is filled in place, because moving it would
    /// also copy its unused capacity.
    fn set_inline(&mut self, descs: &[MemDesc]) {
        *self = Self::Inline(ArrayVec::new());
        if let Self::Inline(list) = self {
            let taken = list.try_extend_from_slice(descs);
            taken.expect("no more than there is room for");
        }
    }

    /// Returns the number of available descriptors.
    #[must_use]
    pub fn entries(&self) -> u32 {
        match self {
            Self::Empty | Self::External { .. } => 0,
            Self::Inline(list) => list.len() as u32,
            Self::Pooled { entries, .. } => *entries,
        }
    }

    /// Returns the descriptor at `index`.
    ///
    /// # Panics
    /// If `index` is out of range.
    #[must_use]
    pub fn desc(&self, index: u32) -> MemDesc {
        match self {
            Self::Inline(list) => list[index as usize],
            Self::Pooled { buffer, entries } if index < *entries => {
                let mut desc = MemDesc::new_zeroed();
                buffer.read(index * MemDesc::LEN as u32, desc.as_mut_bytes());
                desc
            }
            _ => panic!("no descriptor {index}"),
        }
    }

    /// Checks that the total length of the descriptors is at least `declared` bytes.
    ///
    /// # Errors
    /// [`TableError::Short`].
    pub fn check(&self, declared: u32) -> Result<(), TableError> {
        let all: u64 = (0..self.entries())
            .map(|i| u64::from(self.desc(i).data_len()))
            .sum();
        short(all, declared)
    }

    /// Returns the buffer to the pool, if there is one.
    pub fn release(&mut self, pool: &mut Pool) {
        // A table is expensive to move, so only do this if there is a buffer to return.
        if !matches!(self, Self::Pooled { .. }) {
            *self = Self::Empty;
        } else if let Self::Pooled { buffer, .. } = std::mem::take(self) {
            pool.release(buffer);
        }
    }
}

impl RemoteMemory for Table {
    fn range(&self, index: u32) -> RemoteRange {
        let desc = self.desc(index);
        RemoteRange {
            addr: desc.va(),
            rkey: RKey(desc.key()),
            len: desc.data_len(),
        }
    }
}

/// The tables of a command, and the external table that is being fetched.
///
/// A command can have an external table in one direction only, because we do not support
/// bidirectional commands.
#[derive(Debug, Default)]
pub struct Tables {
    data_out: Table,
    data_in: Table,
    /// The external table that is being read, and the buffer for it.
    fetch: Option<(Table, Buffer)>,
}

impl Tables {
    /// Stores the descriptors of a command. Returns `false` if there is no room in the pool.
    ///
    /// # Errors
    /// [`TableError`].
    pub fn store_descriptors(
        &mut self,
        cmd: &Cmd<'_>,
        pool: &mut Pool,
        owner: Owner,
    ) -> Result<bool, TableError> {
        // If there is no room for the second table, the first is released with the command.
        Ok(self
            .data_out
            .store_descriptors(&cmd.data_out, pool, owner)?
            && self.data_in.store_descriptors(&cmd.data_in, pool, owner)?)
    }

    /// Returns where the descriptors are stored.
    #[must_use]
    pub fn descriptors(&self) -> Descriptors {
        let mut descriptors = Descriptors::default();
        for table in [&self.data_out, &self.data_in] {
            descriptors.external |= matches!(table, Table::External { .. });
            descriptors.pooled |= matches!(table, Table::Pooled { .. });
        }
        descriptors
    }

    /// Returns the descriptor of an external table that has not been fetched.
    #[must_use]
    pub fn external(&self) -> Option<MemDesc> {
        let both = [&self.data_out, &self.data_in];
        both.into_iter().find_map(|table| match table {
            Table::External { remote, .. } => Some(*remote),
            _ => None,
        })
    }

    /// Starts to fetch an external table into a buffer.
    pub fn begin_fetch(&mut self, remote: MemDesc, buffer: Buffer) {
        let source = Table::inline([remote]);
        self.fetch = Some((source, buffer));
    }

    /// Uses the external table after it was fetched.
    ///
    /// # Errors
    /// [`TableError::Short`].
    ///
    /// # Panics
    /// If no table was fetched.
    pub fn on_fetched(&mut self) -> Result<(), TableError> {
        let (_, buffer) = self.fetch.take().expect("a table was fetched");
        let external = [&mut self.data_out, &mut self.data_in]
            .into_iter()
            .find(|table| matches!(table, Table::External { .. }))
            .expect("its place is still empty");
        let Table::External { remote, data_len } = *external else {
            unreachable!("found as external");
        };
        *external = Table::Pooled {
            buffer,
            entries: remote.data_len() / MemDesc::LEN as u32,
        };
        external.check(data_len)
    }

    /// Returns both sides of a transfer: for the table that is being fetched, or for the command's
    /// data.
    ///
    /// # Panics
    /// If there is neither a fetch nor `data`.
    #[must_use]
    pub fn sides<'a>(
        &'a self,
        direction: Direction,
        data: Option<&'a Buffer>,
    ) -> (&'a Table, &'a Buffer) {
        if let Some((source, buffer)) = &self.fetch {
            return (source, buffer);
        }
        let table = match direction {
            Direction::FromInitiator => &self.data_out,
            Direction::ToInitiator => &self.data_in,
        };
        (table, data.expect("a transfer has a buffer"))
    }

    /// Returns the buffers of the tables to the pool.
    pub fn release(&mut self, pool: &mut Pool) {
        self.data_out.release(pool);
        self.data_in.release(pool);
        if self.fetch.is_some()
            && let Some((_, buffer)) = self.fetch.take()
        {
            pool.release(buffer);
        }
    }
}

fn check_sum<'a>(
    descs: impl Iterator<Item = &'a MemDesc>,
    declared: u32,
) -> Result<(), TableError> {
    short(descs.map(|d| u64::from(d.data_len())).sum(), declared)
}

fn short(described: u64, declared: u32) -> Result<(), TableError> {
    if described < u64::from(declared) {
        return Err(TableError::Short {
            described,
            declared,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use riser_scsi::srp::IndirectTable;

    use zerocopy::FromBytes as _;

    use super::*;
    use crate::fabric::{PortionLimits, RdmaRequest, Requests, Transfer};

    fn descs(n: u32, len: u32) -> Vec<MemDesc> {
        (0..n)
            .map(|i| MemDesc::new(u64::from(i) << 20, i, len))
            .collect()
    }

    fn indirect(inline: &[MemDesc], entries: u32, len: u32) -> DataBuffer<'_> {
        DataBuffer::Indirect(IndirectTable {
            table: MemDesc::new(0x5000, 9, entries * 16),
            len,
            inline,
        })
    }

    #[test]
    fn long_tables_use_pool_buffers() {
        let mut pool = Pool::new(1 << 20).unwrap();
        for n in [1, 16, 17, 255] {
            let list = descs(n, 512);
            let data = indirect(&list, n, n * 512);
            let mut table = Table::default();
            assert!(table.store_descriptors(&data, &mut pool, Owner(1)).unwrap());
            assert_eq!(table.entries(), n);
            assert_eq!(table.desc(n - 1), list[n as usize - 1]);
            assert_eq!(pool.is_whole(), n <= 16);
            table.check(n * 512).unwrap();
            assert!(table.check(n * 512 + 1).is_err());
            table.release(&mut pool);
            assert!(pool.is_whole());
        }
    }

    #[test]
    fn short_table_is_rejected_without_leak() {
        let mut pool = Pool::new(1 << 20).unwrap();
        let list = descs(40, 512);
        let data = indirect(&list, 40, 40 * 512 + 1);
        let mut table = Table::default();
        let error = table
            .store_descriptors(&data, &mut pool, Owner(1))
            .unwrap_err();
        assert_eq!(
            error,
            TableError::Short {
                described: 40 * 512,
                declared: 40 * 512 + 1
            }
        );
        let data = indirect(&[], 2049, 512);
        assert_eq!(
            table
                .store_descriptors(&data, &mut pool, Owner(1))
                .unwrap_err(),
            TableError::TooLong(2049)
        );
        assert!(pool.is_whole());
    }

    fn lists(requests: Requests<'_, impl RemoteMemory>) -> Vec<RdmaRequest> {
        requests.map(RdmaRequest::to_list).collect()
    }

    /// A list of descriptors without a pool buffer.
    struct List(Vec<MemDesc>);

    impl RemoteMemory for List {
        fn range(&self, index: u32) -> RemoteRange {
            let one = Table::Inline([self.0[index as usize]].into_iter().collect());
            one.range(0)
        }
    }

    proptest! {
        /// A table in separate pages of the pool should result in the same requests as its
        /// descriptors, and the number of requests should match.
        #[test]
        fn fragmented_table_yields_same_requests(
            lens in proptest::collection::vec(1u32..1500, 200..700),
            is_read in any::<bool>(),
            wrs in 1u32..300,
            sges in 1usize..4,
        ) {
            let mut pool = Pool::new(16 << 20).unwrap();
            let pages: Vec<_> = (1..=128)
                .map_while(|owner| pool.take_table(Owner(owner), 4096))
                .collect();
            let (odd, even): (Vec<_>, Vec<_>) =
                pages.into_iter().enumerate().partition(|(i, _)| i % 2 == 1);
            even.into_iter().for_each(|(_, page)| pool.release(page));
            let list: Vec<_> = lens
                .iter()
                .enumerate()
                .map(|(i, &len)| MemDesc::new((i as u64) << 20, i as u32, len))
                .collect();
            let total: u32 = lens.iter().sum();
            let data = indirect(&list, list.len() as u32, total);
            let mut table = Table::default();
            prop_assert!(table.store_descriptors(&data, &mut pool, Owner(0)).unwrap());
            let buffer = pool.allocate(total).unwrap();
            let direction = match is_read {
                true => Direction::FromInitiator,
                false => Direction::ToInitiator,
            };
            let list = List(list);
            let mut transfer = Transfer::new(direction, total);
            loop {
                let counted = transfer.plan(&table, &buffer, PortionLimits { wrs, sges });
                let requests: Vec<_> = lists(transfer.requests(&table, &buffer));
                prop_assert_eq!(requests.len(), counted as usize);
                let expected: Vec<_> = lists(transfer.requests(&list, &buffer));
                prop_assert_eq!(requests, expected);
                let is_last = transfer.is_last();
                transfer.portion_done();
                if is_last {
                    break;
                }
            }
            table.release(&mut pool);
            pool.release(buffer);
            odd.into_iter().for_each(|(_, page)| pool.release(page));
            prop_assert!(pool.is_whole());
        }
    }

    /// Checks that each work request is contained in a single descriptor, that they are in order,
    /// and that they transfer all data.
    fn check_requests(table: &Table, len: u32, limits: PortionLimits, pool: &mut Pool) {
        let buffer = pool.allocate(len).expect("the pool is large enough");
        let mut transfer = Transfer::new(Direction::ToInitiator, len);
        let (mut sent, mut index, mut offset) = (0, 0, 0);
        loop {
            let counted = transfer.plan(table, &buffer, limits);
            let requests: Vec<_> = lists(transfer.requests(table, &buffer));
            assert_eq!(requests.len(), counted as usize);
            assert!((1..=limits.wrs).contains(&counted));
            for request in requests {
                while offset == table.desc(index).data_len() {
                    (index, offset) = (index + 1, 0);
                }
                let desc = table.desc(index);
                assert_eq!(request.remote.rkey, RKey(desc.key()));
                let addr = desc.va().wrapping_add(offset.into());
                assert_eq!(request.remote.addr, addr);
                assert!(request.local.len() <= limits.sges);
                offset += request.bytes();
                assert!(offset <= desc.data_len(), "beyond its descriptor");
                sent += request.bytes();
            }
            let is_last = transfer.is_last();
            transfer.portion_done();
            if is_last {
                break;
            }
        }
        assert_eq!(sent, len);
        pool.release(buffer);
    }

    /// Checks that descriptors from a peer are either rejected, or that each byte is transferred
    /// once to the right address. The input contains limits for a portion, a length and the
    /// location of the table, followed by the descriptors.
    fn check_descriptors(bytes: &[u8], pool: &mut Pool) {
        let Some((&[wrs, sges, place, high, low], rest)) = bytes.split_first_chunk() else {
            return;
        };
        let whole = rest.len() - rest.len() % MemDesc::LEN;
        let list = <[MemDesc]>::ref_from_bytes(&rest[..whole]).expect("whole descriptors");
        let len = u32::from_be_bytes([0, place >> 4, high, low]);
        let entries = list.len() as u32;
        let (is_external, is_direct) = (place & 1 != 0, place & 2 != 0);
        let data = match list.first() {
            None => return,
            Some(desc) if is_direct => DataBuffer::Direct(*desc),
            _ if is_external => indirect(&[], entries, len),
            _ => indirect(list, entries, len),
        };
        let described: u64 = list.iter().map(|d| u64::from(d.data_len())).sum();
        let mut tables = Tables::default();
        let taken = tables.data_in.store_descriptors(&data, pool, Owner(0));
        let fetched = match (taken, tables.external()) {
            (Ok(true), Some(remote)) => {
                let buffer = pool.take_table(Owner(0), remote.data_len()).unwrap();
                buffer.write(0, list.as_bytes());
                tables.begin_fetch(remote, buffer);
                tables.on_fetched().is_ok()
            }
            (taken, _) => taken.is_ok_and(|has_room| has_room),
        };
        assert_eq!(fetched, is_direct || described >= u64::from(len));
        let len = match data {
            DataBuffer::Direct(desc) => len.min(desc.data_len()),
            _ => len,
        };
        if fetched && len > 0 {
            let limits = PortionLimits {
                wrs: u32::from(wrs) + 1,
                sges: usize::from(sges % 8) + 1,
            };
            assert_eq!(
                tables.data_in.entries(),
                if is_direct { 1 } else { entries }
            );
            check_requests(&tables.data_in, len, limits, pool);
        }
        tables.release(pool);
        assert!(pool.is_whole());
    }

    #[test]
    fn descriptor_tables() {
        bolero::check!(name = "descriptor_tables").for_each(|bytes: &[u8]| {
            let mut pool = Pool::new(4 << 20).unwrap();
            check_descriptors(bytes, &mut pool);
        });
    }
}
