//! Descriptor tables: where a command's data lies in the initiator's memory.
//!
//! A direct descriptor and a short indirect table fit the command's own context. A longer table, and
//! an external one that must first be read from the initiator, lie in a buffer of the pool, so that
//! a channel's memory does not depend on what its peer sends.

use arrayvec::ArrayVec;
use riser_scsi::access::DataAccess;
use riser_scsi::srp::{DataBuffer, MemDesc};
use riser_transport::verbs::{RKey, RemoteAddr};
use zerocopy::{FromBytes, IntoBytes};

use crate::pool::{Buffer, Owner, Pool};

/// Descriptors that a table holds without a pool buffer.
pub const INLINE_DESCRIPTORS: usize = 16;

/// Descriptors of the longest table that a target accepts.
pub const MAX_DESCRIPTORS: u32 = 2048;

/// Ranges of the initiator's memory, in order.
#[derive(Debug, Default)]
pub enum Table {
    /// No data goes in this direction.
    #[default]
    Empty,
    /// A few descriptors.
    Inline(ArrayVec<MemDesc, INLINE_DESCRIPTORS>),
    /// Descriptors in a buffer of the pool.
    Pooled {
        /// Their bytes.
        buffer: Buffer,
        /// How many there are.
        entries: u32,
    },
    /// Descriptors that the command only points to.
    External {
        /// Where the initiator keeps them.
        remote: MemDesc,
        /// Length of the data that they describe, in bytes.
        data_len: u32,
    },
}

/// Why a command's descriptors cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// More descriptors than [`MAX_DESCRIPTORS`].
    #[error("a table of {0} descriptors")]
    TooLong(u32),
    /// The descriptors describe less memory than the command says.
    #[error("descriptors describe {described} of {declared} bytes")]
    Short {
        /// Sum of the descriptors' lengths.
        described: u64,
        /// What the command says.
        declared: u32,
    },
}

/// A table taken from a command.
#[derive(Debug)]
pub enum Taken {
    /// The table.
    Ready(Table),
    /// The pool has no buffer to hold it at the moment.
    NoBuffer,
}

impl Table {
    /// Takes over the descriptors of one direction of a command.
    ///
    /// # Errors
    /// [`TableError`]; nothing is held then.
    pub fn take(data: &DataBuffer<'_>, pool: &mut Pool, owner: Owner) -> Result<Taken, TableError> {
        Ok(Taken::Ready(match data {
            DataBuffer::None | DataBuffer::Immediate { .. } => Self::Empty,
            DataBuffer::Direct(desc) => Self::Inline([*desc].into_iter().collect()),
            DataBuffer::Indirect(table) => {
                let entries = table.entries();
                if entries > MAX_DESCRIPTORS {
                    return Err(TableError::TooLong(entries));
                }
                if !table.is_complete() {
                    Self::External {
                        remote: table.table,
                        data_len: table.len,
                    }
                } else {
                    check_sum(table.inline.iter(), table.len)?;
                    if table.inline.len() <= INLINE_DESCRIPTORS {
                        Self::Inline(table.inline.iter().copied().collect())
                    } else {
                        let bytes = table.inline.as_bytes();
                        let Some(buffer) = pool.take_table(owner, bytes.len() as u32) else {
                            return Ok(Taken::NoBuffer);
                        };
                        buffer.write(0, bytes);
                        Self::Pooled { buffer, entries }
                    }
                }
            }
        }))
    }

    /// Number of descriptors at hand.
    #[must_use]
    pub fn entries(&self) -> u32 {
        match self {
            Self::Empty | Self::External { .. } => 0,
            Self::Inline(list) => list.len() as u32,
            Self::Pooled { entries, .. } => *entries,
        }
    }

    /// The descriptor at `index`.
    ///
    /// # Panics
    /// If `index` is out of range.
    #[must_use]
    pub fn desc(&self, index: u32) -> MemDesc {
        match self {
            Self::Inline(list) => list[index as usize],
            Self::Pooled { buffer, entries } if index < *entries => {
                // Descriptors are sixteen bytes and blocks are multiples of that, so none crosses
                // from one block of the buffer to the next.
                let run = buffer.chunk(index * MemDesc::LEN as u32);
                let (desc, _) = MemDesc::read_from_prefix(run).expect("a whole descriptor");
                desc
            }
            _ => panic!("no descriptor {index}"),
        }
    }

    /// Checks that the descriptors describe at least `declared` bytes.
    ///
    /// # Errors
    /// [`TableError::Short`].
    pub fn check(&self, declared: u32) -> Result<(), TableError> {
        let all: u64 = (0..self.entries())
            .map(|i| u64::from(self.desc(i).data_len()))
            .sum();
        short(all, declared)
    }

    /// Gives buffers back.
    pub fn release(&mut self, pool: &mut Pool) {
        if let Self::Pooled { buffer, .. } = std::mem::take(self) {
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

/// Where a descriptor points, `offset` bytes on. The address may wrap if the initiator says so: its
/// own device refuses that range, and only its own request fails.
#[must_use]
pub fn remote(desc: &MemDesc, offset: u32) -> RemoteAddr {
    RemoteAddr {
        addr: desc.va().wrapping_add(u64::from(offset)),
        rkey: RKey(desc.key()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_scsi::srp::IndirectTable;

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
    fn long_tables_lie_in_the_pool() {
        let mut pool = Pool::new(1 << 20).unwrap();
        for n in [1, 16, 17, 255] {
            let list = descs(n, 512);
            let data = indirect(&list, n, n * 512);
            let Taken::Ready(mut table) = Table::take(&data, &mut pool, Owner(1)).unwrap() else {
                panic!("the pool is empty");
            };
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
    fn a_table_that_describes_too_little_is_refused_and_holds_nothing() {
        let mut pool = Pool::new(1 << 20).unwrap();
        let list = descs(40, 512);
        let data = indirect(&list, 40, 40 * 512 + 1);
        let error = Table::take(&data, &mut pool, Owner(1)).unwrap_err();
        assert_eq!(
            error,
            TableError::Short {
                described: 40 * 512,
                declared: 40 * 512 + 1
            }
        );
        let data = indirect(&[], 2049, 512);
        assert_eq!(
            Table::take(&data, &mut pool, Owner(1)).unwrap_err(),
            TableError::TooLong(2049)
        );
        assert!(pool.is_whole());
    }
}
