//! What a power cut may undo.
//!
//! A cut leaves each block with one of its *survivors*: the versions that no durable version came
//! wholly after. Versions that have been overwritten in the cache may be among them, so those that
//! [`prune`](super) forgets are kept here until a newer one is durable. After the cut, all survivors
//! begin anew, as if each had been written at that instant; the first that is read was the one.
//!
//! # Flushes across a cut
//!
//! | flush that was answered GOOD | makes durable |
//! | --- | --- |
//! | all acknowledgements since the last cut that came before it began | of all ports |
//! | acknowledgements before a cut | of its own port, unless a flush of that port has failed since |
//!
//! The second line is the promise of an initiator, which sees that a target may have lost its cache:
//! the next flush fails, and with it every one that was under way. Of what others have written, it
//! knows nothing. A flush that fails beside another that succeeds may have reported the loss first.
//!
//! # Lost write-backs
//! What a disk fails to write back ([`History::lose_write_back`]) is lost like what a cut takes, but
//! its target goes on, and can know it. So until an administrator has been told of the loss
//! ([`History::forgive_losses`]), no flush that is answered GOOD may cover what was lost, of any port.

use std::collections::{BTreeMap, HashMap};

use super::{Entry, History, Port, State, Version, Violation};

/// Names a flush that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlushId(u64);

/// An acknowledged write that was not durable when the power was cut.
#[derive(Debug)]
struct Risk {
    version: Version,
    acknowledged: u64,
    zone: (u64, u64),
    /// Flushes of all ports answer for it: the target has lost it, and not with its power.
    is_of_all: bool,
}

/// What a block held after a power cut.
#[derive(Debug)]
struct Survivor {
    cut: u64,
    version: Version,
    zone: (u64, u64),
}

#[derive(Debug, Default)]
struct Block {
    /// Versions that were overwritten, and may come back with a cut.
    overwritten: Vec<Entry>,
    risks: Vec<Risk>,
    survivors: Vec<Survivor>,
}

/// What is known of the cache and the medium below it.
#[derive(Debug, Default)]
pub(super) struct Durability {
    /// Instants of the cuts.
    cuts: Vec<u64>,
    /// By block; none where no cut is possible.
    blocks: Vec<Block>,
    flushes: BTreeMap<FlushId, Port>,
    /// When the last flush of a port that failed ended.
    failed: HashMap<Port, u64>,
    /// When an administrator was last told of what was lost.
    forgiven: u64,
}

impl Durability {
    /// Returns the number of power cuts.
    pub(super) fn cuts(&self) -> usize {
        self.cuts.len()
    }

    /// Keeps versions of a block that were overwritten.
    pub(super) fn keep(&mut self, block: u64, pruned: Vec<Entry>) {
        if let Some(block) = self.blocks.get_mut(block as usize) {
            block.overwritten.extend(pruned);
        }
    }
}

/// The latest of the durable versions: what came wholly before it does not come back.
fn durable_from<'a>(entries: impl Iterator<Item = &'a Entry>) -> u64 {
    let durable = entries.filter(|e| e.is_durable && e.end != u64::MAX);
    durable.map(|e| e.zone().0).max().unwrap_or(0)
}

impl State {
    /// Forgets what a cut cannot bring back any more.
    pub(super) fn forget_overwritten(&mut self, block: u64) {
        let entries = &self.blocks[block as usize];
        if let Some(block) = self.durability.blocks.get_mut(block as usize) {
            let newest = durable_from(entries.iter().chain(&block.overwritten));
            block.overwritten.retain(|e| e.zone().1 >= newest);
        }
    }

    /// A version was read: if it is one that a cut has left, it is the only one that was.
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

    /// Zeroes were read, of one of several writes: if a cut has left them, it has left nothing else.
    pub(super) fn survive_as_zeroes(&mut self, block: u64) {
        let entries = &mut self.blocks[block as usize];
        if entries.iter().all(|e| !e.is_zero || e.origin.is_some()) {
            entries.retain(|e| e.is_zero || e.origin.is_none());
        }
    }

    /// A block has lost what was not durable, with the power or on a target that goes on.
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
            // What is under way may be carried out after the cut as well.
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

    /// A flush that began then covers what was acknowledged by then.
    fn cover(&mut self, port: Port, begin: u64, block: usize) -> Result<(), Violation> {
        let last_cut = self.durability.cuts.last().copied().unwrap_or(0);
        let kept = &mut self.durability.blocks[block];
        // Another flush of the port that is under way may fail, and report a loss.
        let is_alone = !self.durability.flushes.values().any(|p| *p == port);
        let failed = self.durability.failed.get(&port).copied().unwrap_or(0);
        let known = failed.max(self.durability.forgiven);
        let is_kept = |e: &Entry, at| e.version.writer == port && is_alone && at > known;
        // One whose answer came after a cut may have been lost by it, like one before.
        let is_covered = |e: &Entry| {
            let at = e.acknowledged.filter(|at| (last_cut..begin).contains(at));
            at.is_some_and(|at| e.is_certain || is_kept(e, at))
        };
        let all = self.blocks[block].iter_mut().chain(&mut kept.overwritten);
        for entry in all.filter(|e| is_covered(e)) {
            (entry.is_certain, entry.is_durable) = (true, true);
        }
        let is_answered =
            |r: &mut Risk| (r.version.writer == port || r.is_of_all) && r.acknowledged < begin;
        let risks = kept.risks.extract_if(.., is_answered);
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
    /// A durable write was acknowledged that had begun before the last cut: what came wholly before
    /// it is not there any more.
    pub(super) fn replace_survivors(&mut self, block: u64, begin: u64) {
        // A read under way may have seen it before.
        if self.oldest_read().is_none() {
            let is_before = |e: &Entry| e.origin.is_some_and(|zone| zone.1 < begin);
            self.blocks[block as usize].retain(|e| !is_before(e));
        }
    }

    /// A write was not let through.
    pub(super) fn remove(&mut self, block: u64, version: Version) {
        self.blocks[block as usize].retain(|e| e.version != version);
        if let Some(block) = self.durability.blocks.get_mut(block as usize) {
            block.overwritten.retain(|e| e.version != version);
        }
    }
}

impl History {
    /// The same, where the power may be cut: [`power_cut`](Self::power_cut).
    #[must_use]
    pub fn with_power_cuts(self) -> Self {
        let mut state = self.lock();
        state.durability.blocks = state.blocks.iter().map(|_| Block::default()).collect();
        drop(state);
        self
    }

    /// The power was cut, and is back: what was not durable may be lost.
    ///
    /// # Panics
    /// Without [`with_power_cuts`](Self::with_power_cuts).
    pub fn power_cut(&self) {
        let mut state = self.lock();
        let blocks = state.blocks.len();
        assert_eq!(state.durability.blocks.len(), blocks, "cuts are possible");
        let now = state.tick();
        // From now on only the writers can know of an earlier loss.
        let kept = state.durability.blocks.iter_mut();
        kept.flat_map(|kept| &mut kept.risks)
            .for_each(|risk| risk.is_of_all = false);
        for block in 0..blocks {
            state.cut(block, false);
        }
        state.durability.cuts.push(now);
    }

    /// The disk has failed to write back what it held of these blocks, and no longer has it.
    ///
    /// # Panics
    /// Without [`with_power_cuts`](Self::with_power_cuts).
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

    /// An administrator was told that writes may be lost, and takes it from there.
    pub fn forgive_losses(&self) {
        let mut state = self.lock();
        state.durability.forgiven = state.tick();
        for kept in &mut state.durability.blocks {
            kept.risks.retain(|risk| !risk.is_of_all);
        }
    }

    /// A flush of the whole disk is about to be sent.
    pub fn begin_flush(&self, port: Port) -> FlushId {
        let mut state = self.lock();
        let id = FlushId(state.tick());
        state.durability.flushes.insert(id, port);
        id
    }

    /// A flush was answered GOOD.
    ///
    /// # Errors
    /// [`Violation::Lost`]: what it covers was lost before.
    ///
    /// # Panics
    /// If the flush has ended before.
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

    /// A flush failed, or has no answer.
    ///
    /// # Panics
    /// If the flush has ended before.
    pub fn fail_flush(&self, id: FlushId) {
        let mut state = self.lock();
        let port = state.durability.flushes.remove(&id);
        let port = port.expect("a flush under way");
        let now = state.tick();
        state.durability.failed.insert(port, now);
    }
}
