//! [`Disk`]: an in-memory file or block device, with a volatile cache above its stable sectors.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::lock;

/// Bytes that a disk writes atomically: a crash never tears a sector.
pub const SECTOR: u64 = 512;

/// A sector's bytes, or `None` if it is not allocated and reads as zeroes.
type Sector = Option<Box<[u8; SECTOR as usize]>>;

/// An in-memory file or block device. Clones refer to the same disk.
///
/// Writes go to the cache, and reads see them there. A flush makes them stable. A
/// [`crash`](Disk::crash) keeps either the stable version or any version written since, for each
/// sector. A failed write-back ([`fail_write_back`](Disk::fail_write_back)) is reported like Linux
/// does: once for each open file, and the cache treats the data as clean.
#[derive(Debug, Clone)]
pub struct Disk(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    len: u64,
    /// Allocated sectors that survive a crash.
    stable: BTreeMap<u64, Sector>,
    /// Versions written since the last flush, from oldest to newest, with their position in the
    /// order of all writes. No list is empty.
    dirty: BTreeMap<u64, Vec<(u64, Sector)>>,
    /// Number of the last sector change.
    changes: u64,
    /// Cached sectors that are treated as clean, but were not written back.
    lost: BTreeMap<u64, Sector>,
    error: WriteBackError,
    /// Pending writes through the page cache: number, offset and data.
    writing: Vec<(u64, u64, Vec<u8>)>,
    next_writing: u64,
    /// Bytes that cannot be read.
    unreadable: Vec<Range<u64>>,
    /// Set if the disk can't be reopened.
    refuses: bool,
    /// Set if each operation blocks a thread.
    blocks_threads: bool,
    /// Error number of all flushes.
    failing: Option<i32>,
}

/// The last failed write-back, and whether it was reported (Linux, `lib/errseq.c`).
#[derive(Debug, Default)]
struct WriteBackError {
    errno: i32,
    /// Number of failures so far.
    count: u64,
    /// Set if an open file has reported the last failure.
    is_seen: bool,
}

/// An open file: a disk, and the failed write-backs that it has reported. Clones share both.
#[derive(Debug, Clone)]
pub struct File {
    disk: Disk,
    /// Number of the last failure that doesn't need to be reported.
    seen: Arc<Mutex<u64>>,
    /// Set if reads and writes are copied through the page cache, which may tear a sector.
    is_buffered: bool,
}

/// A write through the page cache, pending until this is dropped.
#[derive(Debug)]
pub(crate) struct Writing {
    disk: Disk,
    number: u64,
}

impl Drop for Writing {
    fn drop(&mut self) {
        let writing = &mut lock(&self.disk.0).writing;
        writing.retain(|(number, ..)| *number != self.number);
    }
}

impl State {
    /// Returns the sector as seen by processes.
    fn sector(&self, number: u64) -> &Sector {
        let dirty = self.dirty.get(&number).and_then(|versions| versions.last());
        let cached = dirty
            .map(|(_, sector)| sector)
            .or_else(|| self.lost.get(&number));
        cached.or_else(|| self.stable.get(&number)).unwrap_or(&None)
    }

    fn write_sector(&mut self, number: u64, sector: Sector) {
        // The page whose write-back failed is overwritten, and is dirty again.
        self.lost.remove(&number);
        self.changes += 1;
        let version = (self.changes, sector);
        self.dirty.entry(number).or_default().push(version);
    }

    fn write_back(&mut self, number: u64, sector: Sector) {
        match sector {
            Some(_) => self.stable.insert(number, sector),
            None => self.stable.remove(&number),
        };
    }

    /// Makes dirty sectors in a range stable, up to the change number `until`.
    fn flush(&mut self, first: u64, end: u64, until: u64) {
        let numbers: Vec<u64> = self.dirty.range(first..end).map(|(n, _)| *n).collect();
        for number in numbers {
            let mut versions = self.dirty.remove(&number).unwrap_or_default();
            let covered = versions.partition_point(|(change, _)| *change <= until);
            let later = versions.split_off(covered);
            if let Some((_, newest)) = versions.pop() {
                self.write_back(number, newest);
            }
            if !later.is_empty() {
                self.dirty.insert(number, later);
            }
        }
    }

    /// Changes a byte range sector by sector. `change` gets the affected bytes of the sector, their
    /// offset in the range, and whether they are the whole sector. It returns whether the sector
    /// stays allocated.
    fn change(
        &mut self,
        offset: u64,
        len: u64,
        mut change: impl FnMut(&mut [u8], usize, bool) -> bool,
    ) {
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let (number, within) = (at / SECTOR, (at % SECTOR) as usize);
            let part = (SECTOR - at % SECTOR).min(len - done) as usize;
            let mut bytes = match self.sector(number) {
                Some(bytes) => bytes.clone(),
                None => Box::new([0; SECTOR as usize]),
            };
            let is_whole = part as u64 == SECTOR;
            let is_kept = change(&mut bytes[within..within + part], done as usize, is_whole);
            self.write_sector(number, is_kept.then_some(bytes));
            done += part as u64;
        }
        self.len = self.len.max(offset + len);
    }
}

impl Disk {
    /// Returns whether both are the same disk.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Creates a disk of `len` zero bytes, without any allocated sectors.
    #[must_use]
    pub fn new(len: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            len,
            ..State::default()
        })))
    }

    /// Opens the disk. Write-back failures that happen later are also reported to this file.
    #[must_use]
    pub fn open(&self) -> File {
        let error = &lock(&self.0).error;
        // An error that no open file has reported is reported to the next file that is opened.
        let seen = if error.is_seen || error.count == 0 {
            error.count
        } else {
            error.count - 1
        };
        File {
            disk: self.clone(),
            seen: Arc::new(Mutex::new(seen)),
            is_buffered: false,
        }
    }

    /// Opens the disk again for a file that is already open.
    ///
    /// # Errors
    /// Returns `EMFILE` while this is disabled by [`Disk::refuse`].
    pub fn reopen(&self) -> io::Result<File> {
        let refuses = lock(&self.0).refuses;
        match refuses {
            true => Err(io::Error::from_raw_os_error(libc::EMFILE)),
            false => Ok(self.open()),
        }
    }

    /// Sets whether [`Disk::reopen`] fails, as in a process that has too many open files.
    pub fn refuse(&self, refuses: bool) {
        lock(&self.0).refuses = refuses;
    }

    /// Returns whether both are the same disk.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Sets whether the file system needs a waiting thread for each operation, like FUSE and NFS
    /// do, or a frozen file system.
    pub fn set_blocks_threads(&self, blocks: bool) {
        lock(&self.0).blocks_threads = blocks;
    }

    pub(crate) fn blocks_threads(&self) -> bool {
        lock(&self.0).blocks_threads
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        lock(&self.0).len
    }

    /// Returns whether the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Changes the length, which is stable immediately. Data beyond the new length is lost.
    pub fn set_len(&self, len: u64) {
        let mut state = lock(&self.0);
        if len < state.len {
            let (first, within) = (len / SECTOR, len % SECTOR);
            if within > 0 {
                state.change(len, SECTOR - within, |part, _, _| {
                    part.fill(0);
                    true
                });
            }
            // Only visit sectors that exist, because a file that has grown is mostly a hole.
            let others = len.div_ceil(SECTOR)..;
            let written = state.dirty.range(others.clone()).map(|(n, _)| *n);
            let lost = state.lost.range(others.clone()).map(|(n, _)| *n);
            let stable = state.stable.range(others).map(|(n, _)| *n);
            let numbers: Vec<u64> = written.chain(lost).chain(stable).collect();
            numbers
                .into_iter()
                .for_each(|number| state.write_sector(number, None));
            state.flush(first, u64::MAX, u64::MAX);
        }
        state.len = len;
    }

    /// Reads from the cache, like a process does. Returns the number of bytes before the end of the
    /// disk.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> usize {
        let state = lock(&self.0);
        let len = state.len.saturating_sub(offset).min(out.len() as u64) as usize;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let (number, within) = (at / SECTOR, (at % SECTOR) as usize);
            let part = (SECTOR as usize - within).min(len - done);
            match state.sector(number) {
                Some(bytes) => {
                    out[done..done + part].copy_from_slice(&bytes[within..within + part]);
                }
                None => out[done..done + part].fill(0),
            }
            done += part;
        }
        len
    }

    /// Same as [`Disk::read`], but fails for [unreadable](Disk::set_unreadable) bytes.
    ///
    /// # Errors
    /// Returns `EIO`.
    pub fn try_read(&self, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        let end = offset + out.len() as u64;
        let overlaps = |bytes: &Range<u64>| bytes.start < end && offset < bytes.end;
        if lock(&self.0).unreadable.iter().any(overlaps) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(self.read(offset, out))
    }

    /// Sets the bytes that processes cannot read until this is called again.
    pub fn set_unreadable(&self, bytes: Vec<Range<u64>>) {
        lock(&self.0).unreadable = bytes;
    }

    /// Writes to the cache. A disk that is too short grows.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let change = |part: &mut [u8], from: usize, _| {
            part.copy_from_slice(&data[from..from + part.len()]);
            true
        };
        lock(&self.0).change(offset, data.len() as u64, change);
    }

    /// Zeroes a range up to the end of the disk, in the cache. Whole sectors are deallocated,
    /// unless `stays_allocated` is set.
    pub fn zero(&self, offset: u64, len: u64, stays_allocated: bool) {
        let mut state = lock(&self.0);
        let len = len.min(state.len.saturating_sub(offset));
        state.change(offset, len, |part, _, is_whole| {
            part.fill(0);
            stays_allocated || !is_whole
        });
    }

    /// Allocates the unallocated parts of a range. The contents do not change.
    pub fn allocate(&self, offset: u64, len: u64) {
        let mut state = lock(&self.0);
        let len = len.min(state.len.saturating_sub(offset));
        state.change(offset, len, |_, _, _| true);
    }

    /// Makes all writes stable.
    pub fn flush(&self) {
        self.flush_until(u64::MAX);
    }

    /// Returns the number of the last change. A flush that starts now covers all changes up to this
    /// number.
    pub(crate) fn changes(&self) -> u64 {
        lock(&self.0).changes
    }

    /// Makes writes up to this change stable. Later writes may still be lost.
    pub(crate) fn flush_until(&self, change: u64) {
        lock(&self.0).flush(0, u64::MAX, change);
    }

    /// Makes writes to a range stable.
    pub fn flush_range(&self, offset: u64, len: u64) {
        let end = (offset + len).div_ceil(SECTOR);
        lock(&self.0).flush(offset / SECTOR, end, u64::MAX);
    }

    /// Fails the write-back of those dirty sectors for which `is_lost` returns true. The cache
    /// still has their data, but no flush will write it. Every open file reports the error once.
    pub fn fail_write_back(&self, errno: i32, mut is_lost: impl FnMut(u64) -> bool) {
        let mut state = lock(&self.0);
        let numbers: Vec<u64> = state.dirty.keys().copied().collect();
        for number in numbers.into_iter().filter(|number| is_lost(*number)) {
            let newest = state.dirty.remove(&number).and_then(|mut v| v.pop());
            let newest = newest.and_then(|(_, sector)| sector);
            state.lost.insert(number, newest);
        }
        let count = state.error.count + 1;
        state.error = WriteBackError {
            errno,
            count,
            is_seen: false,
        };
    }

    /// Fails the write-back of all dirty sectors in each [`File::sync`], until this is called again.
    pub fn fail_syncs(&self, errno: Option<i32>) {
        lock(&self.0).failing = errno;
    }

    /// Evicts clean sectors from the cache, so that lost writes are no longer visible. Returns the
    /// numbers of the lost sectors.
    pub fn drop_cache(&self) -> Vec<u64> {
        let lost = std::mem::take(&mut lock(&self.0).lost);
        lost.into_keys().collect()
    }

    /// Same as [`Disk::drop_cache`], for the sectors in a range, like `posix_fadvise(2)`.
    pub fn drop_cached(&self, offset: u64, len: u64) {
        let end = (offset + len).div_ceil(SECTOR);
        let is_kept = |number: &u64| !(offset / SECTOR..end).contains(number);
        lock(&self.0).lost.retain(|number, _| is_kept(number));
    }

    /// Returns whether a write-back has failed and no open file has reported it. In this case, the
    /// next file that is opened will report it.
    #[must_use]
    pub fn has_unseen_error(&self) -> bool {
        let error = &lock(&self.0).error;
        error.count > 0 && !error.is_seen
    }

    /// Simulates a power failure. One version of each dirty sector remains. It is selected by
    /// `choose`, which gets the sector's number and the number of versions written since the last
    /// flush. 0 is the stable version, 1 the first version written since.
    ///
    /// # Panics
    /// Panics if the selected version does not exist.
    pub fn crash(&self, mut choose: impl FnMut(u64, usize) -> usize) {
        let mut state = lock(&self.0);
        for (number, mut versions) in std::mem::take(&mut state.dirty) {
            let chosen = choose(number, versions.len());
            if chosen > 0 {
                let (_, version) = versions.swap_remove(chosen - 1);
                state.write_back(number, version);
            }
        }
        state.lost.clear();
        state.error = WriteBackError::default();
    }

    /// Returns the numbers of all dirty sectors, with the number of their versions.
    #[must_use]
    pub fn dirty(&self) -> Vec<(u64, usize)> {
        let state = lock(&self.0);
        state.dirty.iter().map(|(n, v)| (*n, v.len())).collect()
    }

    /// Returns whether the sector at `offset` is allocated, and the length of the extent with the
    /// same state, limited to `len` bytes.
    #[must_use]
    pub fn extent(&self, offset: u64, len: u64) -> (bool, u64) {
        let state = lock(&self.0);
        let end = offset.saturating_add(len).min(state.len);
        let is_data = |at: u64| state.sector(at / SECTOR).is_some();
        let first = is_data(offset);
        let mut at = offset;
        while at < end && is_data(at) == first {
            at = (at / SECTOR + 1) * SECTOR;
        }
        (first, at.min(end).saturating_sub(offset))
    }

    /// Returns the number of allocated bytes.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        let state = lock(&self.0);
        let written = state.dirty.keys().chain(state.lost.keys());
        let mut numbers: Vec<u64> = written.chain(state.stable.keys()).copied().collect();
        numbers.sort_unstable();
        numbers.dedup();
        let data = numbers.into_iter().filter(|n| state.sector(*n).is_some());
        data.count() as u64 * SECTOR
    }
}

impl File {
    /// Returns the same file, opened through the page cache: a read sees the first half of each
    /// sector as it was before a pending write, and the second half as it will be after it.
    #[must_use]
    pub fn buffered(self) -> Self {
        Self {
            is_buffered: true,
            ..self
        }
    }

    pub(crate) fn is_buffered(&self) -> bool {
        self.is_buffered
    }

    /// Starts a write, which is pending until the returned value is dropped.
    pub(crate) fn begin_write(
        &self,
        offset: u64,
        data: impl FnOnce() -> Vec<u8>,
    ) -> Option<Writing> {
        if !self.is_buffered {
            return None;
        }
        let state = &mut *lock(&self.disk.0);
        let number = state.next_writing;
        state.next_writing += 1;
        state.writing.push((number, offset, data()));
        let disk = self.disk.clone();
        Some(Writing { disk, number })
    }

    /// Like [`Disk::try_read`], but mixes in pending writes. Returns an error number.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<usize, i32> {
        let read = self.disk.try_read(offset, out);
        let len = read.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        if !self.is_buffered {
            return Ok(len);
        }
        let state = lock(&self.disk.0);
        let sectors = out[..len].chunks_exact_mut(SECTOR as usize);
        for (at, sector) in (offset..).step_by(SECTOR as usize).zip(sectors) {
            for (_, start, data) in &state.writing {
                let written = at.checked_sub(*start).and_then(|from| {
                    let from = from as usize;
                    data.get(from..from + sector.len())
                });
                if let Some(written) = written {
                    let half = sector.len() / 2;
                    sector[half..].copy_from_slice(&written[half..]);
                }
            }
        }
        Ok(len)
    }

    /// Makes all writes stable, like `fdatasync(2)`.
    ///
    /// # Errors
    /// Returns a write-back error that this file has not reported yet.
    pub fn sync(&self) -> io::Result<()> {
        let failing = lock(&self.disk.0).failing;
        match failing {
            Some(errno) => self.disk.fail_write_back(errno, |_| true),
            None => self.disk.flush(),
        }
        self.check_write_back()
            .map_err(io::Error::from_raw_os_error)
    }

    /// Returns the underlying disk.
    #[must_use]
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Checks for a write-back error that this file has not reported yet.
    ///
    /// # Errors
    /// Returns the error number.
    pub(crate) fn check_write_back(&self) -> Result<(), i32> {
        let error = &mut lock(&self.disk.0).error;
        let mut seen = lock(&self.seen);
        // The count restarts after a crash, but files opened before the crash are no longer used.
        if error.count <= std::mem::replace(&mut *seen, error.count) {
            return Ok(());
        }
        error.is_seen = true;
        Err(error.errno)
    }
}
