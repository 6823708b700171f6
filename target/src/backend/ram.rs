//! Sparse memory of a RAM disk.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use riser_memory::MemSlice;
use riser_scsi::step::Allocation;

/// Chunk size in bytes, for allocating and freeing memory.
pub(super) const CHUNK: u64 = 64 << 10;

/// Number of locks, to avoid contention between workers. Chunk `n` is protected by lock
/// `n % SHARDS`.
const SHARDS: u64 = 64;

type Shard = HashMap<u64, Box<[u8]>>;

/// Size of a chunk in a file: its number (little-endian) and its content.
const RECORD: u64 = 8 + CHUNK;

/// Chunks by number. A missing chunk reads as zeroes. The number of chunks is limited by the disk
/// size, because callers never exceed it.
#[derive(Debug)]
pub struct Ram {
    shards: Box<[RwLock<Shard>]>,
    generation: [u8; 16],
}

/// The part of a range within a single chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    chunk: u64,
    start: usize,
    len: usize,
}

/// Position in a list of pieces.
struct Cursor<'a> {
    /// The current piece and all others after it.
    pieces: &'a [MemSlice],
    /// Offset in the current piece.
    at: usize,
}

impl<'a> Cursor<'a> {
    fn new(pieces: &'a [MemSlice]) -> Self {
        Self { pieces, at: 0 }
    }

    /// Returns the number of bytes in all pieces.
    fn total(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }

    /// Calls `copy` for the next `len` bytes with each piece, the offset in it, and the range within
    /// these bytes.
    fn advance(&mut self, len: usize, mut copy: impl FnMut(&MemSlice, usize, Range<usize>)) {
        let mut done = 0;
        while let (true, Some(piece)) = (done < len, self.pieces.first()) {
            let run = (piece.len() - self.at).min(len - done);
            copy(piece, self.at, done..done + run);
            done += run;
            self.at += run;
            if self.at == piece.len() {
                (self.pieces, self.at) = (&self.pieces[1..], 0);
            }
        }
    }
}

/// Returns the number of bytes of a chunk that are used by whole blocks.
const fn used(block_size: u64) -> u64 {
    CHUNK - CHUNK % block_size
}

/// Returns the parts of a range of whole blocks in each chunk. No block is split, because another
/// thread could access it between two parts, so the end of a chunk may be unused.
fn parts(offset: u64, block_size: u64, len: u64) -> impl Iterator<Item = Part> {
    let used = used(block_size);
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < len).then(|| {
            let at = offset + done;
            let start = at % used;
            let part = Part {
                chunk: at / used,
                start: start as usize,
                len: (used - start).min(len - done) as usize,
            };
            done += part.len as u64;
            part
        })
    })
}

impl Default for Ram {
    fn default() -> Self {
        Self::of_generation(random_generation())
    }
}

/// Returns a unique name of sixteen bytes.
pub(crate) fn random_generation() -> [u8; 16] {
    // The keys of `RandomState` are random for each process and different for each value, which is
    // sufficient for a name.
    let half = || RandomState::new().build_hasher().finish().to_be_bytes();
    let mut generation = [0; 16];
    generation[..8].copy_from_slice(&half());
    generation[8..].copy_from_slice(&half());
    generation
}

impl Ram {
    /// Creates an empty RAM disk with the generation of another one, in order to take over its
    /// content.
    #[must_use]
    pub fn of_generation(generation: [u8; 16]) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
            generation,
        }
    }

    /// Identifies the content. It is unique, so a RAM disk with the same name has a different
    /// generation after a restart.
    #[must_use]
    pub fn generation(&self) -> [u8; 16] {
        self.generation
    }

    fn read_shard(&self, chunk: u64) -> RwLockReadGuard<'_, Shard> {
        // A panic in another thread can't make the data inconsistent.
        self.shards[(chunk % SHARDS) as usize]
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn write_shard(&self, chunk: u64) -> RwLockWriteGuard<'_, Shard> {
        self.shards[(chunk % SHARDS) as usize]
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads whole blocks at `offset` into these pieces, in order.
    pub(super) fn read(&self, offset: u64, block_size: u64, into: &[MemSlice]) {
        let mut cursor = Cursor::new(into);
        for part in parts(offset, block_size, cursor.total()) {
            let shard = self.read_shard(part.chunk);
            let bytes = shard.get(&part.chunk);
            cursor.advance(part.len, |piece, at, run| match bytes {
                Some(bytes) => {
                    let from = part.start + run.start;
                    piece.write(at, &bytes[from..from + run.len()]);
                }
                // The buffer contains data of previous commands, possibly of another initiator.
                None => piece.fill(at, run.len(), 0),
            });
        }
    }

    /// Writes the whole blocks in these pieces, in order, at `offset`.
    pub(super) fn write(&self, offset: u64, block_size: u64, from: &[MemSlice]) {
        let mut cursor = Cursor::new(from);
        for part in parts(offset, block_size, cursor.total()) {
            let mut shard = self.write_shard(part.chunk);
            let bytes = shard
                .entry(part.chunk)
                .or_insert_with(|| vec![0; CHUNK as usize].into_boxed_slice());
            cursor.advance(part.len, |piece, at, run| {
                let to = part.start + run.start;
                piece.read(at, &mut bytes[to..to + run.len()]);
            });
        }
    }

    /// Zeroes a range, and frees all chunks that are completely within this range.
    pub(super) fn discard(&self, offset: u64, block_size: u64, len: u64) {
        for part in parts(offset, block_size, len) {
            let mut shard = self.write_shard(part.chunk);
            // If this is only a part of a chunk, it isn't freed but must read as zeroes as well.
            if part.len as u64 == used(block_size) {
                shard.remove(&part.chunk);
            } else if let Some(bytes) = shard.get_mut(&part.chunk) {
                bytes[part.start..part.start + part.len].fill(0);
            }
        }
    }

    /// Zeroes a range and allocates its chunks.
    pub(super) fn zero(&self, offset: u64, block_size: u64, len: u64) {
        for part in parts(offset, block_size, len) {
            let mut shard = self.write_shard(part.chunk);
            let bytes = shard
                .entry(part.chunk)
                .or_insert_with(|| vec![0; CHUNK as usize].into_boxed_slice());
            bytes[part.start..part.start + part.len].fill(0);
        }
    }

    /// Returns the state at `offset` and its extent, up to `len`.
    pub(super) fn status(&self, offset: u64, block_size: u64, len: u64) -> (Allocation, u64) {
        let state = |p: Part| self.read_shard(p.chunk).contains_key(&p.chunk);
        let mut first = None;
        let mut extent = 0;
        for part in parts(offset, block_size, len) {
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

    /// Moves all data to an empty file. This is done in chunks, so that at most one chunk is stored
    /// in both at any time.
    ///
    /// # Errors
    /// Fails if the file cannot be extended. In this case, each chunk is stored either here or in
    /// the file. Use [`Ram::take_back`] to restore all data.
    pub fn write_to(&self, file: &File) -> io::Result<()> {
        let mut end = 0;
        for shard in &self.shards {
            // The server was shut down, so there are no workers waiting for this lock.
            let mut shard = shard.write().unwrap_or_else(PoisonError::into_inner);
            let mut chunks = std::mem::take(&mut *shard).into_iter();
            while let Some((number, bytes)) = chunks.next() {
                let put = file
                    .write_all_at(&number.to_le_bytes(), end)
                    .and_then(|()| file.write_all_at(&bytes, end + 8));
                if let Err(error) = put {
                    shard.insert(number, bytes);
                    shard.extend(chunks);
                    // Remove the incomplete record.
                    file.set_len(end)?;
                    return Err(error);
                }
                end += RECORD;
            }
        }
        Ok(())
    }

    /// Moves all data of a file back, in chunks.
    ///
    /// # Errors
    /// Returns `InvalidData` if the file is malformed, or a read error.
    pub fn take_back(&self, file: &File) -> io::Result<()> {
        // Start at the end, so that the file shrinks with each chunk, and the data is never
        // duplicated in memory.
        let mut end = file.metadata()?.len();
        // Truncated data would result in a disk with missing data.
        if !end.is_multiple_of(RECORD) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        while end > 0 {
            end -= RECORD;
            let mut number = [0; 8];
            file.read_exact_at(&mut number, end)?;
            let number = u64::from_le_bytes(number);
            let mut bytes = vec![0; CHUNK as usize].into_boxed_slice();
            file.read_exact_at(&mut bytes, end + 8)?;
            self.write_shard(number).insert(number, bytes);
            file.set_len(end)?;
        }
        Ok(())
    }

    /// Returns the number of allocated chunks.
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
        let all: Vec<_> = parts(CHUNK - 10, 2, CHUNK + 20).collect();
        let lens: Vec<_> = all.iter().map(|p| (p.chunk, p.start, p.len)).collect();
        let chunk = 65536;
        assert_eq!(lens, [(0, chunk - 10, 10), (1, 0, chunk), (2, 0, 10)]);
        assert_eq!(parts(5, 1, 0).count(), 0);
    }

    #[test]
    fn writes_allocate_and_discards_free_memory() {
        let ram = Ram::default();
        let m = Memory::new(4096).unwrap();
        m.fill(0, 4096, 7);
        ram.write(1 << 40, 512, &[m.whole()]);
        assert_eq!(ram.chunks(), 1);
        assert_eq!(
            ram.status(1 << 40, 512, 1 << 20),
            (Allocation::Mapped, CHUNK)
        );
        assert_eq!(
            ram.status((1 << 40) + CHUNK, 512, 1 << 20),
            (Allocation::Deallocated, 1 << 20)
        );
        ram.discard(1 << 40, 512, 512);
        let back = Memory::new(4096).unwrap();
        ram.read(1 << 40, 512, &[back.whole()]);
        let bytes = back.whole().to_vec();
        assert!(bytes[..512].iter().all(|&b| b == 0) && bytes[512..].iter().all(|&b| b == 7));
        ram.discard(1 << 40, 512, CHUNK);
        assert_eq!(ram.chunks(), 0);
        ram.zero(0, 512, 512);
        assert_eq!(ram.status(0, 512, 512), (Allocation::Mapped, 512));
    }

    fn memfd() -> File {
        let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC);
        File::from(fd.unwrap())
    }

    #[test]
    fn content_survives_transfer_through_file() {
        let ram = Ram::default();
        let block = Memory::new(4096).unwrap();
        for chunk in 0..200u64 {
            block.fill(0, 4096, chunk as u8);
            ram.write(chunk * 3 * CHUNK + 4096, 512, &[block.whole()]);
        }
        let file = memfd();
        ram.write_to(&file).unwrap();
        assert_eq!(
            (ram.chunks(), file.metadata().unwrap().len()),
            (0, 200 * RECORD)
        );
        let next = Ram::default();
        next.take_back(&file).unwrap();
        assert_eq!((next.chunks(), file.metadata().unwrap().len()), (200, 0));
        for chunk in 0..200u64 {
            next.read(chunk * 3 * CHUNK + 4096, 512, &[block.whole()]);
            assert!(block.whole().to_vec().iter().all(|&b| b == chunk as u8));
        }
        file.set_len(5).unwrap();
        assert!(next.take_back(&file).is_err());
    }

    #[test]
    fn full_file_loses_no_content() {
        let ram = Ram::default();
        let block = Memory::new(4096).unwrap();
        for chunk in 0..200u64 {
            block.fill(0, 4096, chunk as u8);
            ram.write(chunk * CHUNK, 512, &[block.whole()]);
        }
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert!(ram.write_to(&full).is_err());
        assert_eq!(ram.chunks(), 200);
    }
}
