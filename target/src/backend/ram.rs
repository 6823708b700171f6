//! The sparse memory of a RAM disk.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use riser_memory::MemSlice;
use riser_scsi::step::Allocation;

/// Bytes of a chunk: the unit in which memory comes and goes.
pub(super) const CHUNK: u64 = 64 << 10;

/// Locks, so that workers seldom meet. Chunk `n` is under lock `n % SHARDS`.
const SHARDS: u64 = 64;

type Shard = HashMap<u64, Box<[u8]>>;

/// Bytes of a chunk in a file: its number, little-endian, and its content.
const RECORD: u64 = 8 + CHUNK;

/// Chunks by number; an absent one reads as zeroes. Bounded by the disk's size, since the caller
/// never reaches beyond it.
#[derive(Debug)]
pub struct Ram {
    shards: Box<[RwLock<Shard>]>,
    generation: [u8; 16],
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

impl Default for Ram {
    fn default() -> Self {
        Self::of_generation(random_generation())
    }
}

/// Sixteen bytes that no other call gives.
pub(crate) fn random_generation() -> [u8; 16] {
    // Keys of `RandomState` are random for each process and others for each value, which is enough
    // for a name.
    let half = || RandomState::new().build_hasher().finish().to_be_bytes();
    let mut generation = [0; 16];
    generation[..8].copy_from_slice(&half());
    generation[8..].copy_from_slice(&half());
    generation
}

impl Ram {
    /// An empty one that is to have the content of another, and so its generation.
    #[must_use]
    pub fn of_generation(generation: [u8; 16]) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
            generation,
        }
    }

    /// Names this content: no other RAM disk has it, not even one of the same name after a restart.
    #[must_use]
    pub fn generation(&self) -> [u8; 16] {
        self.generation
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
                    // The buffer has bytes of earlier commands, perhaps of another initiator.
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
            // A part of a chunk frees nothing, but must read as zeroes as well.
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

    /// Moves everything to an empty file, chunk by chunk, so that no more than one is in both.
    ///
    /// # Errors
    /// The file has no room; everything is in one of the two, and [`Ram::take_back`] brings it
    /// together.
    pub fn give_away(&self, file: &File) -> io::Result<()> {
        let mut end = 0;
        for shard in &self.shards {
            // The server has been shut down: no worker waits for this lock.
            let mut shard = shard.write().unwrap_or_else(PoisonError::into_inner);
            let mut chunks = std::mem::take(&mut *shard).into_iter();
            while let Some((number, bytes)) = chunks.next() {
                let put = file
                    .write_all_at(&number.to_le_bytes(), end)
                    .and_then(|()| file.write_all_at(&bytes, end + 8));
                if let Err(error) = put {
                    shard.insert(number, bytes);
                    shard.extend(chunks);
                    // What there is of it is no whole record.
                    file.set_len(end)?;
                    return Err(error);
                }
                end += RECORD;
            }
        }
        Ok(())
    }

    /// Takes everything out of a file again, chunk by chunk.
    ///
    /// # Errors
    /// `InvalidData` if it is no such file; what reading says.
    pub fn take_back(&self, file: &File) -> io::Result<()> {
        // From the end, so that the file shrinks with each chunk and memory never holds both.
        let mut end = file.metadata()?.len();
        // A content cut short would be a disk with holes in it.
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
        let ram = Ram::default();
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

    fn memfd() -> File {
        let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC);
        File::from(fd.unwrap())
    }

    #[test]
    fn what_goes_to_a_file_comes_back_from_it() {
        let ram = Ram::default();
        let block = Memory::new(4096).unwrap();
        for chunk in 0..200u64 {
            block.fill(0, 4096, chunk as u8);
            ram.write(chunk * 3 * CHUNK + 4096, &[block.whole()]);
        }
        let file = memfd();
        ram.give_away(&file).unwrap();
        assert_eq!(
            (ram.chunks(), file.metadata().unwrap().len()),
            (0, 200 * RECORD)
        );
        let next = Ram::default();
        next.take_back(&file).unwrap();
        assert_eq!((next.chunks(), file.metadata().unwrap().len()), (200, 0));
        for chunk in 0..200u64 {
            next.read(chunk * 3 * CHUNK + 4096, &[block.whole()]);
            assert!(block.whole().to_vec().iter().all(|&b| b == chunk as u8));
        }
        file.set_len(5).unwrap();
        assert!(next.take_back(&file).is_err());
    }

    #[test]
    fn a_file_without_room_loses_nothing() {
        let ram = Ram::default();
        let block = Memory::new(4096).unwrap();
        for chunk in 0..200u64 {
            block.fill(0, 4096, chunk as u8);
            ram.write(chunk * CHUNK, &[block.whole()]);
        }
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert!(ram.give_away(&full).is_err());
        assert_eq!(ram.chunks(), 200);
    }
}
