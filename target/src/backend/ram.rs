//! The sparse memory of a RAM disk.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use riser_memory::MemSlice;
use riser_scsi::step::Allocation;

/// Bytes of a chunk: the unit in which memory comes and goes.
pub(super) const CHUNK: u64 = 64 << 10;

/// Locks, so that workers seldom meet. Chunk `n` is under lock `n % SHARDS`.
const SHARDS: u64 = 64;

type Shard = HashMap<u64, Box<[u8]>>;

/// Chunks by number; an absent one reads as zeroes. Bounded by the disk's size, since the caller
/// never reaches beyond it.
#[derive(Debug)]
pub(super) struct Ram {
    shards: Box<[RwLock<Shard>]>,
}

/// A part of a range that lies in one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    chunk: u64,
    start: usize,
    len: usize,
    /// Bytes of the range before this part.
    done: u64,
}

fn parts(offset: u64, len: u64) -> impl Iterator<Item = Part> {
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < len).then(|| {
            let at = offset + done;
            let start = at % CHUNK;
            let part = Part {
                chunk: at / CHUNK,
                start: start as usize,
                len: (CHUNK - start).min(len - done) as usize,
                done,
            };
            done += part.len as u64;
            part
        })
    })
}

impl Ram {
    pub(super) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
        }
    }

    fn read_shard(&self, chunk: u64) -> RwLockReadGuard<'_, Shard> {
        // Bytes stay bytes after a panic elsewhere.
        self.shards[(chunk % SHARDS) as usize]
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn write_shard(&self, chunk: u64) -> RwLockWriteGuard<'_, Shard> {
        self.shards[(chunk % SHARDS) as usize]
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Fills the pieces, in order, from `offset` on.
    pub(super) fn read(&self, offset: u64, into: &[MemSlice]) {
        let mut at = offset;
        for piece in into {
            for part in parts(at, piece.len() as u64) {
                match self.read_shard(part.chunk).get(&part.chunk) {
                    Some(bytes) => piece.write(
                        part.done as usize,
                        &bytes[part.start..part.start + part.len],
                    ),
                    None => piece.fill(part.done as usize, part.len, 0),
                }
            }
            at += piece.len() as u64;
        }
    }

    /// Stores the pieces, in order, from `offset` on.
    pub(super) fn write(&self, offset: u64, from: &[MemSlice]) {
        let mut at = offset;
        for piece in from {
            for part in parts(at, piece.len() as u64) {
                let mut shard = self.write_shard(part.chunk);
                let bytes = shard
                    .entry(part.chunk)
                    .or_insert_with(|| vec![0; CHUNK as usize].into_boxed_slice());
                piece.read(
                    part.done as usize,
                    &mut bytes[part.start..part.start + part.len],
                );
            }
            at += piece.len() as u64;
        }
    }

    /// Zeroes a range and frees the chunks that lie in it whole.
    pub(super) fn discard(&self, offset: u64, len: u64) {
        for part in parts(offset, len) {
            let mut shard = self.write_shard(part.chunk);
            if part.len as u64 == CHUNK {
                shard.remove(&part.chunk);
            } else if let Some(bytes) = shard.get_mut(&part.chunk) {
                bytes[part.start..part.start + part.len].fill(0);
            }
        }
    }

    /// Zeroes a range and allocates its chunks.
    pub(super) fn zero(&self, offset: u64, len: u64) {
        for part in parts(offset, len) {
            let mut shard = self.write_shard(part.chunk);
            let bytes = shard
                .entry(part.chunk)
                .or_insert_with(|| vec![0; CHUNK as usize].into_boxed_slice());
            bytes[part.start..part.start + part.len].fill(0);
        }
    }

    /// The state at `offset` and how far it reaches, up to `len`.
    pub(super) fn status(&self, offset: u64, len: u64) -> (Allocation, u64) {
        let state = |p: Part| self.read_shard(p.chunk).contains_key(&p.chunk);
        let mut first = None;
        let mut extent = 0;
        for part in parts(offset, len) {
            let allocated = state(part);
            if *first.get_or_insert(allocated) != allocated {
                break;
            }
            extent += part.len as u64;
        }
        let allocation = if first == Some(true) {
            Allocation::Mapped
        } else {
            Allocation::Deallocated
        };
        (allocation, extent)
    }

    /// Chunks that hold memory.
    #[cfg(test)]
    pub(super) fn chunks(&self) -> usize {
        (0..SHARDS).map(|s| self.read_shard(s).len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_memory::Memory;

    #[test]
    fn parts_conserve_bytes_across_chunks() {
        let all: Vec<_> = parts(CHUNK - 10, CHUNK + 20).collect();
        let lens: Vec<_> = all.iter().map(|p| (p.chunk, p.start, p.len)).collect();
        let chunk = 65536;
        assert_eq!(lens, [(0, chunk - 10, 10), (1, 0, chunk), (2, 0, 10)]);
        assert_eq!(parts(5, 0).count(), 0);
    }

    #[test]
    fn memory_comes_with_writes_and_goes_with_discards() {
        let ram = Ram::new();
        let m = Memory::new(4096).unwrap();
        m.fill(0, 4096, 7);
        ram.write(1 << 40, &[m.whole()]);
        assert_eq!(ram.chunks(), 1);
        assert_eq!(ram.status(1 << 40, 1 << 20), (Allocation::Mapped, CHUNK));
        assert_eq!(
            ram.status((1 << 40) + CHUNK, 1 << 20),
            (Allocation::Deallocated, 1 << 20)
        );
        ram.discard(1 << 40, 512);
        let back = Memory::new(4096).unwrap();
        ram.read(1 << 40, &[back.whole()]);
        let bytes = back.whole().to_vec();
        assert!(bytes[..512].iter().all(|&b| b == 0) && bytes[512..].iter().all(|&b| b == 7));
        ram.discard(1 << 40, CHUNK);
        assert_eq!(ram.chunks(), 0);
        ram.zero(0, 512);
        assert_eq!(ram.status(0, 512), (Allocation::Mapped, 512));
    }
}
