//! [`Disk`]: a file or block device in memory, with a volatile cache above its stable sectors.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use super::lock;

/// Bytes that a disk writes as a whole: a crash tears no sector.
pub const SECTOR: u64 = 512;

/// A sector's bytes; none where nothing is allocated, which reads as zeroes.
type Sector = Option<Box<[u8; SECTOR as usize]>>;

/// A file or block device in memory. Clones are the same one.
///
/// A write goes to the cache, from where reads have it. A flush makes it stable. A
/// [`crash`](Disk::crash) keeps of every sector its stable version or one of those written since. A
/// write-back that has failed ([`fail_write_back`](Disk::fail_write_back)) is reported as Linux
/// does: once for each open file, and the cache takes the data for clean.
#[derive(Debug, Clone)]
pub struct Disk(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    len: u64,
    /// Sectors that survive a crash, and are not zero.
    stable: BTreeMap<u64, Sector>,
    /// Versions written since the last flush, the newest last, and the order of all writes. None is
    /// empty.
    dirty: BTreeMap<u64, Vec<(u64, Sector)>>,
    /// Number of the last change of a sector.
    changes: u64,
    /// Sectors in the cache that are taken for clean, but were not written back.
    lost: BTreeMap<u64, Sector>,
    error: WriteBackError,
    /// Writes under way that go through the page cache: number, offset and data.
    writing: Vec<(u64, u64, Vec<u8>)>,
    next_writing: u64,
    /// It is not opened again.
    refuses: bool,
    /// Each operation blocks a thread.
    blocks_threads: bool,
}

/// The last failed write-back, and who knows of it (Linux, `lib/errseq.c`).
#[derive(Debug, Default)]
struct WriteBackError {
    errno: i32,
    /// Number of failures so far.
    count: u64,
    /// An open file has reported the last one.
    is_seen: bool,
}

/// An open file: a disk, and which failed write-backs it has reported. Clones share both.
#[derive(Debug, Clone)]
pub struct File {
    disk: Disk,
    /// Number of the last failure that it need not report.
    seen: Arc<Mutex<u64>>,
    /// Reads and writes are copies of the page cache, which may divide a sector.
    is_buffered: bool,
}

/// A write through the page cache that is under way until this goes.
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
    /// The sector as processes see it.
    fn sector(&self, number: u64) -> &Sector {
        let dirty = self.dirty.get(&number).and_then(|versions| versions.last());
        let cached = dirty
            .map(|(_, sector)| sector)
            .or_else(|| self.lost.get(&number));
        cached.or_else(|| self.stable.get(&number)).unwrap_or(&None)
    }

    fn put(&mut self, number: u64, sector: Sector) {
        // The failed page is written again, and is dirty.
        self.lost.remove(&number);
        self.changes += 1;
        let version = (self.changes, sector);
        self.dirty.entry(number).or_default().push(version);
    }

    fn settle(&mut self, number: u64, sector: Sector) {
        match sector {
            Some(_) => self.stable.insert(number, sector),
            None => self.stable.remove(&number),
        };
    }

    /// Makes what is dirty in a range of sectors stable, as far as it was changed by then.
    fn flush(&mut self, first: u64, end: u64, until: u64) {
        let numbers: Vec<u64> = self.dirty.range(first..end).map(|(n, _)| *n).collect();
        for number in numbers {
            let mut versions = self.dirty.remove(&number).unwrap_or_default();
            let covered = versions.partition_point(|(change, _)| *change <= until);
            let later = versions.split_off(covered);
            if let Some((_, newest)) = versions.pop() {
                self.settle(number, newest);
            }
            if !later.is_empty() {
                self.dirty.insert(number, later);
            }
        }
    }

    /// Changes a range in memory, sector by sector: `change` gets the sector's bytes, the part of
    /// them, and where that part lies in the range.
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
            self.put(number, is_kept.then_some(bytes));
            done += part as u64;
        }
        self.len = self.len.max(offset + len);
    }
}

impl Disk {
    /// Whether both are the same disk.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A disk of `len` bytes, all zero and none of them allocated.
    #[must_use]
    pub fn new(len: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            len,
            ..State::default()
        })))
    }

    /// Opens it. What fails to be written back from now on is reported to this file, too.
    #[must_use]
    pub fn open(&self) -> File {
        let error = &lock(&self.0).error;
        // An error that no open file has reported is reported to the next one.
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

    /// Opens it once more, for a file that is open.
    ///
    /// # Errors
    /// `EMFILE`, as long as [`Disk::refuse`] says so.
    pub fn reopen(&self) -> io::Result<File> {
        let refuses = lock(&self.0).refuses;
        match refuses {
            true => Err(io::Error::from_raw_os_error(libc::EMFILE)),
            false => Ok(self.open()),
        }
    }

    /// Whether [`Disk::reopen`] fails from now on, as in a process that has too many files.
    pub fn refuse(&self, refuses: bool) {
        lock(&self.0).refuses = refuses;
    }

    /// Whether two are the same.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Sets whether its file system executes nothing without a thread that waits for it, as FUSE and
    /// NFS do, or one that is frozen.
    pub fn set_blocks_threads(&self, blocks: bool) {
        lock(&self.0).blocks_threads = blocks;
    }

    pub(crate) fn blocks_threads(&self) -> bool {
        lock(&self.0).blocks_threads
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        lock(&self.0).len
    }

    /// Whether it has no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Gives it another length, which is stable at once; what lies beyond is lost.
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
            // Of the others, those that are there: a file that has grown is mostly a hole.
            let others = len.div_ceil(SECTOR)..;
            let written = state.dirty.range(others.clone()).map(|(n, _)| *n);
            let lost = state.lost.range(others.clone()).map(|(n, _)| *n);
            let stable = state.stable.range(others).map(|(n, _)| *n);
            let numbers: Vec<u64> = written.chain(lost).chain(stable).collect();
            numbers
                .into_iter()
                .for_each(|number| state.put(number, None));
            state.flush(first, u64::MAX, u64::MAX);
        }
        state.len = len;
    }

    /// Reads as a process does, from the cache; returns the bytes before the end.
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

    /// Writes to the cache; a disk that is too short grows.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let change = |part: &mut [u8], from: usize, _| {
            part.copy_from_slice(&data[from..from + part.len()]);
            true
        };
        lock(&self.0).change(offset, data.len() as u64, change);
    }

    /// Zeroes a range up to the end, in the cache. Whole sectors are no longer allocated
    /// afterwards, unless they are to stay.
    pub fn zero(&self, offset: u64, len: u64, stays_allocated: bool) {
        let mut state = lock(&self.0);
        let len = len.min(state.len.saturating_sub(offset));
        state.change(offset, len, |part, _, is_whole| {
            part.fill(0);
            stays_allocated || !is_whole
        });
    }

    /// Allocates a range, as far as it is not; its bytes stay.
    pub fn allocate(&self, offset: u64, len: u64) {
        let mut state = lock(&self.0);
        let len = len.min(state.len.saturating_sub(offset));
        state.change(offset, len, |_, _, _| true);
    }

    /// Makes all that was written stable.
    pub fn flush(&self) {
        self.flush_until(u64::MAX);
    }

    /// Number of the last change: a flush that begins now covers what was changed until then.
    pub(crate) fn changes(&self) -> u64 {
        lock(&self.0).changes
    }

    /// Makes stable what was written by then. What was written later may well be lost.
    pub(crate) fn flush_until(&self, change: u64) {
        lock(&self.0).flush(0, u64::MAX, change);
    }

    /// Makes what was written to a range stable.
    pub fn flush_range(&self, offset: u64, len: u64) {
        let end = (offset + len).div_ceil(SECTOR);
        lock(&self.0).flush(offset / SECTOR, end, u64::MAX);
    }

    /// Fails to write back the dirty sectors that `is_lost` names by their numbers. The cache has
    /// their data still, but no flush will write them; every open file reports the error once.
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

    /// Drops sectors from the cache that are taken for clean: what was lost is read as it is on the
    /// disk. Returns the numbers of those that were lost.
    pub fn drop_cache(&self) -> Vec<u64> {
        let lost = std::mem::take(&mut lock(&self.0).lost);
        lost.into_keys().collect()
    }

    /// Whether a write-back has failed, and no open file has reported it: the next one that is
    /// opened will.
    #[must_use]
    pub fn has_unseen_error(&self) -> bool {
        let error = &lock(&self.0).error;
        error.count > 0 && !error.is_seen
    }

    /// Loses power. Of each dirty sector one version remains, which `choose` names by the sector's
    /// number and the number of versions written since it was stable: 0 is the stable one, 1 the
    /// first of those.
    ///
    /// # Panics
    /// If it names a version that there is not.
    pub fn crash(&self, mut choose: impl FnMut(u64, usize) -> usize) {
        let mut state = lock(&self.0);
        for (number, mut versions) in std::mem::take(&mut state.dirty) {
            let chosen = choose(number, versions.len());
            if chosen > 0 {
                let (_, version) = versions.swap_remove(chosen - 1);
                state.settle(number, version);
            }
        }
        state.lost.clear();
        state.error = WriteBackError::default();
    }

    /// Sectors that are not stable, with the number of their versions.
    #[must_use]
    pub fn dirty(&self) -> Vec<(u64, usize)> {
        let state = lock(&self.0);
        state.dirty.iter().map(|(n, v)| (*n, v.len())).collect()
    }

    /// Whether data are allocated at `offset`, and how far that goes, up to `len` bytes.
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

    /// Bytes that are allocated.
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
    /// The same, through the page cache: a read gets the first half of each sector as it was, and the
    /// other half of a write under way.
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

    /// A write is under way from now on.
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

    /// As [`Disk::read`], beside the writes that are under way.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> usize {
        let len = self.disk.read(offset, out);
        if !self.is_buffered {
            return len;
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
        len
    }

    /// The disk that it is open on.
    #[must_use]
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// The error of a write-back that this file has not reported yet.
    ///
    /// # Errors
    /// Its error number.
    pub(crate) fn check_write_back(&self) -> Result<(), i32> {
        let error = &mut lock(&self.disk.0).error;
        let mut seen = lock(&self.seen);
        // After a crash the numbers begin again, and no file from before is used any more.
        if error.count <= std::mem::replace(&mut *seen, error.count) {
            return Ok(());
        }
        error.is_seen = true;
        Err(error.errno)
    }
}
