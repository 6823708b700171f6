//! Handles data loss caused by a power failure.
//!
//! After a power failure, each block contains one of its *survivors*: these are all versions,
//! unless a durable version was started after they completed. This may include versions that were
//! already overwritten in the cache. So if a version is removed by [`prune`](super), we need to
//! keep it here until a newer version is durable. After the power failure, all survivors are
//! handled as if they had just been written, and the first version returned by a read must be the
//! survivor.
//!
//! # Flushes after a power failure
//!
//! | a flush that returned GOOD | makes durable |
//! | --- | --- |
//! | writes acknowledged since the last power failure and before the flush was started | for all ports |
//! | writes acknowledged before a power failure | for its own port, unless a flush from this port has failed since |
//!
//! The second line is guaranteed by an initiator that can detect that the target may have lost its
//! cache: the next flush will fail, and all pending flushes as well. The initiator doesn't know
//! about writes from other initiators. If a flush fails while another is successful, the failed
//! flush may have been the first to report this.
//!
//! # Failed write-back
//! If a disk fails to write back data ([`History::lose_write_back`]), it's lost in the same way as
//! in a power failure. But in this case the target keeps running and knows about the loss. Until
//! the administrator was notified ([`History::forgive_losses`]), a flush must not return GOOD if it
//! includes the lost data, no matter which port sent it.

use std::collections::{BTreeMap, HashMap};

use super::{Entry, History, Port, State, Version, Violation};

/// ID of a flush that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlushId(u64);

/// An acknowledged write that was not durable at the time of a power failure.
#[derive(Debug)]
struct Risk {
    version: Version,
    acknowledged: u64,
    zone: (u64, u64),
    /// Set if flushes from any port must report this, because the target lost the data without a
    /// power failure.
    is_of_all: bool,
}

/// A version that could be in a block after a power failure.
#[derive(Debug)]
struct Survivor {
    cut: u64,
    version: Version,
    zone: (u64, u64),
}

#[derive(Debug, Default)]
struct Block {
    /// Versions that were overwritten, but could be returned after a power failure.
    overwritten: Vec<Entry>,
    risks: Vec<Risk>,
    survivors: Vec<Survivor>,
}

/// State of the cache and the medium.
#[derive(Debug, Default)]
pub(super) struct Durability {
    /// Times of all power failures.
    cuts: Vec<u64>,
    /// State of each block. Empty if power failures are not allowed.
    blocks: Vec<Block>,
    flushes: BTreeMap<FlushId, Port>,
    /// Completion time of the last failed flush for each port.
    failed: HashMap<Port, u64>,
    /// Time when the administrator was last notified about a loss.
    forgiven: u64,
}

impl Durability {
    /// Returns the number of power failures.
    pub(super) fn cuts(&self) -> usize {
        self.cuts.len()
    }

    /// Keeps versions of a block that were overwritten.
    pub(super) fn keep_entries(&mut self, block: u64, pruned: Vec<Entry>) {
        if let Some(block) = self.blocks.get_mut(block as usize) {
            block.overwritten.extend(pruned);
        }
    }
}

/// Returns the start time of the last durable version: no version that completed before this can be
/// returned again.
fn durable_from<'a>(entries: impl Iterator<Item = &'a Entry>) -> u64 {
    let durable = entries.filter(|e| e.is_durable && e.end != u64::MAX);
    durable.map(|e| e.zone().0).max().unwrap_or(0)
}

impl State {
    /// Returns whether a version that may be in the block is not durable.
    pub(super) fn has_volatile(&self, block: u64) -> bool {
        let overwritten = self.durability.blocks.get(block as usize);
        let overwritten = overwritten.into_iter().flat_map(|block| &block.overwritten);
        let mut entries = self.blocks[block as usize].iter().chain(overwritten);
        entries.any(|entry| !entry.is_durable)
    }

    /// Removes versions that can't be returned after a power failure any more.
    pub(super) fn forget_overwritten(&mut self, block: u64) {
        let entries = &self.blocks[block as usize];
        if let Some(block) = self.durability.blocks.get_mut(block as usize) {
            let newest = durable_from(entries.iter().chain(&block.overwritten));
            block.overwritten.retain(|e| e.zone().1 >= newest);
        }
    }

    /// Handles a read of this version: if it's a survivor of a power failure, all other survivors
    /// are removed.
    pub(super) fn survive(&mut self, block: u64, at: usize) {
        let entries = &mut self.blocks[block as usize];
        let (Some(zone), Some(cut)) = (entries[at].origin, self.durability.cuts.last()) else {
            return;
        };
        let version = entries[at].version;
        entries[at].is_durable = true;
        entries.retain(|e| e.origin.is_none() || e.version == version);
        let block = &mut self.durability.blocks[block as usize];
        if !block.risks.is_empty() && block.survivors.last().is_none_or(|s| s.cut != *cut) {
            block.survivors.push(Survivor {
                cut: *cut,
                version,
                zone,
            });
        }
    }

    /// Handles a read of zeroes that could be from several writes: if they are survivors of a power
    /// failure, all other survivors are removed.
    pub(super) fn survive_as_zeroes(&mut self, block: u64) {
        let entries = &mut self.blocks[block as usize];
        if entries.iter().all(|e| !e.is_zero || e.origin.is_some()) {
            entries.retain(|e| e.is_zero || e.origin.is_none());
        }
    }

    /// Handles the loss of data that was not durable, either in a power failure or by a target that
    /// keeps running.
    fn cut(&mut self, block: usize, is_of_all: bool) {
        let now = self.clock;
        let kept = &mut self.durability.blocks[block];
        let entries = &mut self.blocks[block];
        let newest = durable_from(entries.iter().chain(&kept.overwritten));
        entries.append(&mut kept.overwritten);
        for entry in &*entries {
            if let Some(acknowledged) = entry.acknowledged.filter(|_| !entry.is_durable) {
                kept.risks.push(Risk {
                    version: entry.version,
                    acknowledged,
                    zone: entry.origin.unwrap_or(entry.zone()),
                    is_of_all,
                });
            }
        }
        entries.retain(|e| e.end == u64::MAX || e.zone().1 >= newest);
        let is_alone = entries.len() == 1;
        for entry in entries {
            entry.glimpses.clear();
            entry.is_certain = false;
            // If a write is pending, it may also be executed after the power failure.
            if entry.end == u64::MAX {
                (entry.first_end, entry.last_begin) = (u64::MAX, now);
                continue;
            }
            entry.origin.get_or_insert((
                entry.first_end.min(entry.last_begin),
                entry.first_end.max(entry.last_begin),
            ));
            (entry.begin, entry.end) = (now, now);
            (entry.first_end, entry.last_begin) = (now, now);
            (entry.is_certain, entry.is_durable) = (is_alone, is_alone);
        }
    }

    /// Handles a flush that was started at `begin`, which includes all writes acknowledged before
    /// this time.
    fn cover(&mut self, port: Port, begin: u64, block: usize) -> Result<(), Violation> {
        let last_cut = self.durability.cuts.last().copied().unwrap_or(0);
        let kept = &mut self.durability.blocks[block];
        // If there is another pending flush for this port, it may still fail and report a loss.
        let is_alone = !self.durability.flushes.values().any(|p| *p == port);
        let failed = self.durability.failed.get(&port).copied().unwrap_or(0);
        let known = failed.max(self.durability.forgiven);
        let is_kept = |e: &Entry, at| e.version.writer == port && is_alone && at > known;
        // If the response was received after a power failure, the write may have been lost, same as
        // for a write before it.
        let is_covered = |e: &Entry| {
            let at = e.acknowledged.filter(|at| (last_cut..begin).contains(at));
            at.is_some_and(|at| e.is_certain || is_kept(e, at))
        };
        let all = self.blocks[block].iter_mut().chain(&mut kept.overwritten);
        for entry in all.filter(|e| is_covered(e)) {
            (entry.is_certain, entry.is_durable) = (true, true);
        }
        let is_acknowledged =
            |r: &mut Risk| (r.version.writer == port || r.is_of_all) && r.acknowledged < begin;
        let risks = kept.risks.extract_if(.., is_acknowledged);
        for risk in risks.filter(|r| r.is_of_all || is_alone && r.acknowledged > failed) {
            let is_older = |zone: (u64, u64)| zone.1 < risk.zone.0;
            let mut survivors = kept.survivors.iter();
            let survivor = survivors.find(|s| s.cut > risk.acknowledged && is_older(s.zone));
            if let Some(survivor) = survivor {
                return Err(Violation::Lost {
                    block: block as u64,
                    version: risk.version,
                    seen: survivor.version,
                });
            }
            let entries = &mut self.blocks[block];
            let is_refuted = |e: &Entry| !e.is_certain && e.origin.is_some_and(is_older);
            entries.retain(|e| !is_refuted(e));
        }
        if kept.risks.is_empty() {
            kept.survivors.clear();
        }
        self.forget_overwritten(block as u64);
        Ok(())
    }
}

impl State {
    /// Handles an acknowledgement of a durable write that was started before the last power
    /// failure: any version that completed before it can't be in the block.
    pub(super) fn replace_survivors(&mut self, block: u64, begin: u64) {
        // A pending read may have returned it earlier.
        if self.oldest_read().is_none() {
            let is_before = |e: &Entry| e.origin.is_some_and(|zone| zone.1 < begin);
            self.blocks[block as usize].retain(|e| !is_before(e));
        }
    }

    /// Removes a write that was not applied.
    pub(super) fn remove(&mut self, block: u64, version: Version) {
        self.blocks[block as usize].retain(|e| e.version != version);
        if let Some(block) = self.durability.blocks.get_mut(block as usize) {
            block.overwritten.retain(|e| e.version != version);
        }
    }
}

impl History {
    /// Allows power failures, see [`power_cut`](Self::power_cut).
    #[must_use]
    pub fn with_power_cuts(self) -> Self {
        let mut state = self.lock();
        state.durability.blocks = state.blocks.iter().map(|_| Block::default()).collect();
        drop(state);
        self
    }

    /// Must be called after a power failure: any data that was not durable could be lost.
    ///
    /// # Panics
    /// Panics if [`with_power_cuts`](Self::with_power_cuts) was not used.
    pub fn power_cut(&self) {
        let mut state = self.lock();
        let blocks = state.blocks.len();
        assert_eq!(state.durability.blocks.len(), blocks, "cuts are possible");
        let now = state.tick();
        // After this, only the writers can know about an earlier loss.
        let kept = state.durability.blocks.iter_mut();
        kept.flat_map(|kept| &mut kept.risks)
            .for_each(|risk| risk.is_of_all = false);
        for block in 0..blocks {
            state.cut(block, false);
        }
        state.durability.cuts.push(now);
    }

    /// Must be called when the disk has failed to write back the data for these blocks and doesn't
    /// have this data any more.
    ///
    /// # Panics
    /// Panics if [`with_power_cuts`](Self::with_power_cuts) was not used.
    pub fn lose_write_back(&self, blocks: impl IntoIterator<Item = u64>) {
        let mut blocks = blocks.into_iter().peekable();
        if blocks.peek().is_none() {
            return;
        }
        let mut state = self.lock();
        let now = state.tick();
        for block in blocks {
            state.cut(block as usize, true);
        }
        state.durability.cuts.push(now);
    }

    /// Must be called when the administrator was notified that writes may have been lost and will
    /// handle this.
    pub fn forgive_losses(&self) {
        let mut state = self.lock();
        state.durability.forgiven = state.tick();
        for kept in &mut state.durability.blocks {
            kept.risks.retain(|risk| !risk.is_of_all);
        }
    }

    /// Must be called before a flush for the whole disk is sent.
    pub fn begin_flush(&self, port: Port) -> FlushId {
        let mut state = self.lock();
        let id = FlushId(state.tick());
        state.durability.flushes.insert(id, port);
        id
    }

    /// Must be called when a flush has returned GOOD.
    ///
    /// # Errors
    /// Returns [`Violation::Lost`] if data that should be included was lost earlier.
    ///
    /// # Panics
    /// Panics if this flush has already completed.
    pub fn end_flush(&self, id: FlushId) -> Result<(), Violation> {
        let mut state = self.lock();
        let port = state.durability.flushes.remove(&id);
        let port = port.expect("a flush under way");
        let now = state.tick();
        let all = 0..state.blocks.len() as u64;
        state.fence(port, id.0, all, now);
        for block in 0..state.durability.blocks.len() {
            state.cover(port, id.0, block)?;
        }
        Ok(())
    }

    /// Must be called when a flush has failed or there is no response.
    ///
    /// # Panics
    /// Panics if this flush has already completed.
    pub fn fail_flush(&self, id: FlushId) {
        let mut state = self.lock();
        let port = state.durability.flushes.remove(&id);
        let port = port.expect("a flush under way");
        let now = state.tick();
        state.durability.failed.insert(port, now);
    }
}
