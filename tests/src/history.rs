//! What a disk may answer: a checker of versions, block by block.
//!
//! Each block of 512 bytes that a test writes says which write it is from ([`Version`]) and which
//! block it is for, in all of its bytes. A [`History`] is notified when writes and reads begin and
//! end, and decides whether there is an order of the writes to each block that explains all that
//! was read.
//!
//! # What is promised
//!
//! - A block is whole: it holds what one write put there. Writes of several blocks that overlap and
//!   are concurrent may be mixed, but only at the bounds of blocks (SBC-4 clause 4.29 promises
//!   less).
//! - A write takes effect at one instant between its begin and its end. So a read sees the latest
//!   acknowledged write, or one that is concurrent with that write or with the read.
//! - What was overwritten does not come back: not after a re-login, not after a reset, not at
//!   another reader.
//!
//! # Writes without an acknowledgement
//!
//! | end of a write | it took effect | until |
//! | --- | --- | --- |
//! | [`acknowledge`](History::acknowledge) | yes | the acknowledgement |
//! | [`refuse`](History::refuse): the target answered with an error | perhaps, each block by itself | that answer: the command has ended (SAM-5 clause 5.4) |
//! | [`lose`](History::lose): timed out, connection lost | perhaps | the next fence of its initiator port |
//!
//! A *fence* of an initiator port is the end of any command of that port that began after the loss:
//! nothing that is sent later overtakes a command that timed out (`RequestError::TimedOut`), and a
//! login that replaces a session is not served before the commands of the old session have ended.
//! With several paths ([`History::with_paths`]) that holds for commands that share a block, since
//! only those wait for a path that is lost.
//! The checker sees it by itself, from the number of the port that each read and write is given.
//!
//! # Writes that are repeated
//!
//! An initiator that loses its session, or whose commands are aborted, sends a write again that was
//! not answered; so it may take effect several times until it ends, with other writes in between.
//! The target cannot know that. [`History::with_repeats`] allows it: an acknowledged write then has
//! taken effect at least once between its begin and its end, and not afterwards.
//!
//! # Power cuts
//!
//! [`History::with_power_cuts`] allows [`power_cut`](History::power_cut): what a volatile cache held
//! may be lost then, block by block (`history/durability.rs` has the rules). A write is *durable*
//! once it was [acknowledged as such](History::acknowledge_durable), or once a
//! [flush](History::end_flush) that began after its acknowledgement was answered GOOD. After a cut,
//! each block holds one version: any one that no durable version came wholly after. So a block that
//! was not flushed holds the last durable version, or any that was written since, and never another.
//!
//! # Zeroes
//!
//! Blocks that are zeroed or unmapped ([`begin_zero`](History::begin_zero)) cannot say which write
//! they are from. A read of zeroes counts as one of the zeroing that there is; where there are
//! several, it only has to be of one of them.
//!
//! # Compare and swap
//!
//! If a COMPARE AND WRITE ([`begin_swap`](History::begin_swap)) has succeeded
//! ([`acknowledge_swap`](History::acknowledge_swap)), the block held what was expected, and no
//! other that expected the same version has succeeded; if the comparison failed
//! ([`refute`](History::refute)), nothing was written.
//!
//! # How it decides
//!
//! Versions are unique, so a block is a register of which it is known what each read saw. All that
//! concerns one version is its *zone*, from the first end of an operation on it to the last begin.
//! If that is forwards in time, the block must have had the version during the whole zone;
//! otherwise the version had the block at some instant of the zone. An order exists if and only if
//! no two forward zones overlap and no backward zone lies within a forward zone (Gibbons and
//! Korach, "Testing Shared Memories", 1997, section 4). A write that may be repeated counts as
//! several: one for each read that began before it ended, and one for all later reads. Instants are
//! the order in which the history is notified.

mod durability;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use durability::Durability;
pub use durability::FlushId;

/// Length of a block in bytes.
pub const BLOCK: usize = 512;

/// Which initiator port a command is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Port(pub u16);

impl Port {
    /// Bit of the ports whose data are marked.
    const MARKED: u16 = 0x8000;

    /// Bytes that all marks begin with; the port follows.
    pub const MARK: [u8; 4] = [0xb1, 0x0c, 0x5e, 0xa7];

    /// A port whose data are marked, so that a part of them is known wherever it turns up: each
    /// word of a block, beside its first two, begins with [`Self::MARK`] and the port.
    #[must_use]
    pub const fn marked(number: u16) -> Self {
        Self(number | Self::MARKED)
    }

    fn is_marked(self) -> bool {
        self.0 & Self::MARKED != 0
    }
}

/// Which write the content of a block is from. Zeroes are of version 0 of port 0: never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// The order in which writes began, from 1 on.
    pub sequence: u64,
    /// Who wrote.
    pub writer: Port,
}

impl Version {
    const NONE: Self = Self {
        sequence: 0,
        writer: Port(0),
    };

    /// The words of a block, which depend on the version and the block's address.
    fn words(self, block: u64) -> impl Iterator<Item = u64> {
        let names = [block, self.sequence << 16 | u64::from(self.writer.0)];
        let mark = u64::from(u32::from_be_bytes(Port::MARK)) << 32 | u64::from(self.writer.0) << 16;
        let mix = move |n: u64| {
            let mut word = names[0].rotate_left(32) ^ names[1] ^ n << 56;
            word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            let word = word ^ word >> 31;
            match self.writer.is_marked() {
                true => mark | word & 0xffff,
                false => word,
            }
        };
        names.into_iter().chain((2..64).map(mix))
    }

    /// The version of a write; their numbers begin with 1.
    #[must_use]
    pub const fn new(sequence: u64, writer: Port) -> Self {
        Self { sequence, writer }
    }

    /// Fills a block.
    pub fn fill(self, block: u64, bytes: &mut [u8]) {
        for (word, bytes) in self.words(block).zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
    }

    /// The version of a block; `None` if it is not whole, or of another block.
    #[must_use]
    pub fn of(block: u64, bytes: &[u8]) -> Option<Self> {
        if bytes.iter().all(|b| *b == 0) {
            return Some(Self::NONE);
        }
        let named = u64::from_be_bytes(bytes[8..16].try_into().ok()?);
        let version = Self {
            sequence: named >> 16,
            writer: Port(named as u16),
        };
        let mut words = version.words(block).zip(bytes.chunks_exact(8));
        let is_whole = words.all(|(word, bytes)| bytes == word.to_be_bytes());
        is_whole.then_some(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NONE => f.write_str("nothing"),
            Self { sequence, writer } => write!(f, "write {sequence} of port {}", writer.0),
        }
    }
}

/// What no order of the writes explains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// A block holds parts of several writes, data written to another block, or data never written.
    Torn {
        /// The block.
        block: u64,
        /// The first byte that is not what the block's first words say.
        byte: usize,
        /// Whose the first words are.
        said: Version,
        /// The word of that byte.
        found: u64,
    },
    /// A block holds a version that has been overwritten, or that was never written there.
    Stale {
        /// The block.
        block: u64,
        /// What was read.
        seen: Version,
    },
    /// Two versions of a block each had it before the other.
    Disorder {
        /// The block.
        block: u64,
        /// The versions.
        versions: [Version; 2],
        /// The zones of both, in instants.
        zones: [(u64, u64); 2],
    },
    /// A write was acknowledged and flushed before the power was cut, and the block held an older
    /// version afterwards.
    Lost {
        /// The block.
        block: u64,
        /// What was lost.
        version: Version,
        /// What was there instead.
        seen: Version,
    },
    /// A write that had not taken effect, or had not been let through, was read.
    Refuted {
        /// The block.
        block: u64,
        /// The write.
        version: Version,
    },
    /// Two writes were let through by a comparison with the same version, which was written once.
    SwappedTwice {
        /// The block.
        block: u64,
        /// What both replaced.
        version: Version,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Torn {
                block,
                byte,
                said,
                found,
            } => write!(
                f,
                "block {block} is not whole: it begins as {said}, and differs from byte {byte} on, \
                 where it has {found:016x}"
            ),
            Self::Stale { block, seen } => {
                write!(
                    f,
                    "block {block} holds {seen}, which was overwritten or never written"
                )
            }
            Self::Lost {
                block,
                version,
                seen,
            } => write!(
                f,
                "block {block} lost {version}, which was durable, with the power, and held {seen}"
            ),
            Self::Refuted { block, version } => {
                write!(f, "block {block} holds {version}, whose comparison failed")
            }
            Self::SwappedTwice { block, version } => write!(
                f,
                "block {block}: two comparisons with {version}, written once, let a write through"
            ),
            Self::Disorder {
                block,
                versions: [one, two],
                zones,
            } => write!(
                f,
                "block {block}: no order of {one} and {two} explains what was read and \
                 acknowledged at {zones:?}"
            ),
        }
    }
}

/// Names a write that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WriteId(u64);

/// Names a read that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReadId(u64);

/// A version of one block.
#[derive(Clone, Debug)]
struct Entry {
    version: Version,
    /// It is zeroes, which bear no version.
    is_zero: bool,
    /// When the write began.
    begin: u64,
    /// When the write has taken effect at the latest; `u64::MAX` while that is not known.
    end: u64,
    /// It did take effect: it was acknowledged, or read.
    is_certain: bool,
    /// The first end of an operation on it.
    first_end: u64,
    /// The last begin of an operation on it.
    last_begin: u64,
    /// The zones of single reads of a write that may be repeated. All are backward.
    glimpses: Vec<(u64, u64)>,
    /// When it was acknowledged.
    acknowledged: Option<u64>,
    /// No power cut undoes it, but for a newer version.
    is_durable: bool,
    /// Its zone before the first power cut that came after its end.
    origin: Option<(u64, u64)>,
    /// A write that succeeded because the block had this version.
    is_swapped: bool,
}

impl Entry {
    fn new(version: Version, is_zero: bool, begin: u64) -> Self {
        Self {
            version,
            is_zero,
            begin,
            end: u64::MAX,
            is_certain: false,
            first_end: u64::MAX,
            last_begin: begin,
            glimpses: Vec::new(),
            acknowledged: None,
            is_durable: false,
            origin: None,
            is_swapped: false,
        }
    }

    fn zone(&self) -> (u64, u64) {
        let (a, b) = (self.first_end, self.last_begin);
        (a.min(b), a.max(b))
    }

    /// Whether a block must have had the version for the whole zone.
    fn is_forward(&self) -> bool {
        self.first_end < self.last_begin
    }

    fn conflicts(&self, other: &Self) -> bool {
        if !self.is_certain || !other.is_certain || self.version == other.version {
            return false;
        }
        let ((a, b), (c, d)) = (self.zone(), other.zone());
        if self.is_forward() && other.is_forward() {
            return a < d && c < b;
        }
        self.encloses(other) || other.encloses(self)
    }

    /// Whether the block had this version throughout a time in which it must have had the other.
    fn encloses(&self, other: &Self) -> bool {
        let (a, b) = self.zone();
        let whole = (!other.is_forward()).then_some(other.zone());
        let mut zones = whole.into_iter().chain(other.glimpses.iter().copied());
        self.is_forward() && zones.any(|(c, d)| a < c && d < b)
    }

    /// A read that began and ended then has seen it.
    fn on_read(&mut self, begin: u64, end: u64, repeats: bool) {
        self.is_certain = true;
        if repeats && begin < self.end {
            self.glimpses
                .push((begin.max(self.begin), end.min(self.end)));
            return;
        }
        self.first_end = self.first_end.min(end);
        self.last_begin = self.last_begin.max(begin);
    }
}

#[derive(Debug)]
struct Write {
    version: Version,
    begin: u64,
    /// Number of power cuts before it began.
    cuts: usize,
    blocks: Range<u64>,
    /// It reads its block as well.
    is_swap: bool,
    /// When it was lost, if it was.
    lost: Option<u64>,
}

#[derive(Clone, Debug)]
struct Read {
    port: Port,
    begin: u64,
    /// Number of power cuts before it began.
    cuts: usize,
    blocks: Range<u64>,
}

#[derive(Debug)]
struct State {
    clock: u64,
    sequence: u64,
    /// Writes may be repeated until they end.
    repeats: bool,
    /// A fence is one for writes that share a block with it.
    by_block: bool,
    blocks: Vec<Vec<Entry>>,
    /// Writes that may still take effect.
    writes: HashMap<WriteId, Write>,
    reads: BTreeMap<ReadId, Read>,
    /// COMPARE AND WRITEs that have succeeded.
    swapped: u64,
    durability: Durability,
}

/// What was written and read on one disk. See the module's documentation.
#[derive(Debug)]
pub struct History(Mutex<State>);

impl History {
    /// The history of a disk with `blocks` blocks, all zeroes.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        let nothing = Entry {
            end: 0,
            is_certain: true,
            first_end: 0,
            is_durable: true,
            ..Entry::new(Version::NONE, true, 0)
        };
        Self(Mutex::new(State {
            clock: 0,
            sequence: 0,
            repeats: false,
            by_block: false,
            blocks: vec![vec![nothing]; blocks],
            writes: HashMap::new(),
            reads: BTreeMap::new(),
            swapped: 0,
            durability: Durability::default(),
        }))
    }

    /// The same, where initiators may repeat writes that have not ended.
    #[must_use]
    pub fn with_repeats(self) -> Self {
        self.lock().repeats = true;
        self
    }

    /// The same, where initiators have several paths to the disk.
    #[must_use]
    pub fn with_paths(self) -> Self {
        self.lock().by_block = true;
        self
    }

    /// A panic of another test thread leaves nothing half changed that matters.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A write of these blocks is about to be sent; `bytes` gets its data.
    ///
    /// # Panics
    /// If the blocks are none of the disk's, or `bytes` is not as long as they are.
    pub fn begin_write(&self, port: Port, blocks: Range<u64>, bytes: &mut [u8]) -> WriteId {
        assert_eq!(
            bytes.len() as u64,
            (blocks.end - blocks.start) * BLOCK as u64
        );
        let mut state = self.lock();
        let id = state.begin_write(port, blocks.clone(), false);
        let version = state.writes[&id].version;
        for (block, bytes) in blocks.zip(bytes.chunks_exact_mut(BLOCK)) {
            version.fill(block, bytes);
        }
        id
    }

    /// A COMPARE AND WRITE of this block is about to be sent; `bytes` gets the data to write.
    ///
    /// # Panics
    /// As of [`begin_write`](Self::begin_write).
    pub fn begin_swap(&self, port: Port, block: u64, bytes: &mut [u8]) -> WriteId {
        let id = self.begin_write(port, block..block + 1, bytes);
        let mut state = self.lock();
        state.writes.get_mut(&id).expect("just begun").is_swap = true;
        id
    }

    /// A command that zeroes these blocks is about to be sent.
    ///
    /// # Panics
    /// If the blocks are none of the disk's.
    pub fn begin_zero(&self, port: Port, blocks: Range<u64>) -> WriteId {
        self.lock().begin_write(port, blocks, true)
    }

    /// A write was answered GOOD.
    ///
    /// # Errors
    /// [`Violation`]: what was read cannot be, now that this write is known to have been in effect.
    ///
    /// # Panics
    /// If the write has ended before.
    pub fn acknowledge(&self, id: WriteId) -> Result<(), Violation> {
        self.lock().acknowledge(id, false)
    }

    /// A write was answered GOOD, and is on the medium by then: one with FUA, or of a unit without a
    /// volatile cache.
    ///
    /// # Errors
    /// [`Violation`], as of [`acknowledge`](Self::acknowledge).
    ///
    /// # Panics
    /// If the write has ended before.
    pub fn acknowledge_durable(&self, id: WriteId) -> Result<(), Violation> {
        self.lock().acknowledge(id, true)
    }

    /// A COMPARE AND WRITE of one block was answered GOOD; `expected` is what it compared with, and
    /// `is_durable` says whether it is on the medium.
    ///
    /// # Errors
    /// [`Violation`].
    ///
    /// # Panics
    /// If the write has ended before.
    pub fn acknowledge_swap(
        &self,
        id: WriteId,
        expected: &[u8],
        is_durable: bool,
    ) -> Result<(), Violation> {
        let mut state = self.lock();
        let (begin, block, cuts) = state.names_of(id);
        // After a power cut in between, it is not known which of the two states it has met.
        if cuts == state.durability.cuts() {
            let now = state.tick();
            state.see(block, expected, (begin, now))?;
            state.swap(block, expected, begin)?;
        }
        state.swapped += 1;
        state.acknowledge(id, is_durable)
    }

    /// A COMPARE AND WRITE was answered MISCOMPARE: nothing was written.
    ///
    /// # Errors
    /// [`Violation::Refuted`]: what it would have written was read.
    ///
    /// # Panics
    /// If the write has ended before.
    pub fn refute(&self, id: WriteId) -> Result<(), Violation> {
        let mut state = self.lock();
        let (begin, block, _) = state.names_of(id);
        let version = state.writes[&id].version;
        let now = state.tick();
        let (port, _) = state.end_write(id, now, false);
        state.fence(port, begin, block..block + 1, now);
        let entries = &state.blocks[block as usize];
        let was_seen = entries.iter().any(|e| e.version == version && e.is_certain);
        state.remove(block, version);
        match was_seen {
            true => Err(Violation::Refuted { block, version }),
            false => Ok(()),
        }
    }

    /// A write was answered with an error: it has ended, and each of its blocks may have been
    /// written.
    ///
    /// # Panics
    /// If the write has ended before.
    pub fn refuse(&self, id: WriteId) {
        let mut state = self.lock();
        let (begin, ..) = state.names_of(id);
        let blocks = state.writes[&id].blocks.clone();
        let now = state.tick();
        let (port, _) = state.end_write(id, now, false);
        state.fence(port, begin, blocks, now);
    }

    /// A write was not answered: it may take effect until a fence of its port.
    ///
    /// # Panics
    /// If the write has ended before.
    pub fn lose(&self, id: WriteId) {
        let mut state = self.lock();
        let now = state.tick();
        let write = state.writes.get_mut(&id).expect("a write under way");
        assert!(write.lost.replace(now).is_none(), "it was lost before");
    }

    /// How many writes may take effect although they are over for those who sent them.
    #[must_use]
    pub fn lost(&self) -> usize {
        self.lock()
            .writes
            .values()
            .filter(|w| w.lost.is_some())
            .count()
    }

    /// Number of COMPARE AND WRITEs that have succeeded.
    #[must_use]
    pub fn swapped(&self) -> u64 {
        self.lock().swapped
    }

    /// Number of versions that are kept, of all blocks: those that can still be read, and those that
    /// a command under way may have read.
    #[must_use]
    pub fn versions(&self) -> usize {
        self.lock().blocks.iter().map(Vec::len).sum()
    }

    /// A read of these blocks is about to be sent.
    pub fn begin_read(&self, port: Port, blocks: Range<u64>) -> ReadId {
        let mut state = self.lock();
        let begin = state.tick();
        let cuts = state.durability.cuts();
        let read = Read {
            port,
            begin,
            cuts,
            blocks,
        };
        state.reads.insert(ReadId(begin), read);
        ReadId(begin)
    }

    /// A read was answered GOOD, with these data.
    ///
    /// # Errors
    /// [`Violation`].
    ///
    /// # Panics
    /// If the read has ended before, or `bytes` is not as long as its blocks are.
    pub fn end_read(&self, id: ReadId, bytes: &[u8]) -> Result<(), Violation> {
        let mut state = self.lock();
        let read = state.reads.get(&id).expect("a read under way").clone();
        let len = (read.blocks.end - read.blocks.start) * BLOCK as u64;
        assert_eq!(bytes.len() as u64, len, "the whole answer");
        let now = state.tick();
        // What the fence ends makes older versions be forgotten, but none that this read may have
        // seen.
        state.fence(read.port, read.begin, read.blocks.clone(), now);
        state.reads.remove(&id);
        // One that was answered across a power cut may have been carried out before it, or after.
        let is_across = read.cuts != state.durability.cuts();
        for (block, bytes) in read.blocks.zip(bytes.chunks_exact(BLOCK)) {
            match is_across {
                true => drop(state.version_of(block, bytes)?),
                false => state.see(block, bytes, (read.begin, now))?,
            }
        }
        Ok(())
    }

    /// A read failed, or has no answer.
    pub fn abandon_read(&self, id: ReadId) {
        self.lock().reads.remove(&id);
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// When a write began, its first block, and the number of power cuts before it.
    fn names_of(&self, id: WriteId) -> (u64, u64, usize) {
        let write = self.writes.get(&id).expect("a write under way");
        (write.begin, write.blocks.start, write.cuts)
    }

    fn begin_write(&mut self, port: Port, blocks: Range<u64>, is_zero: bool) -> WriteId {
        self.sequence += 1;
        let version = Version {
            sequence: self.sequence,
            writer: port,
        };
        let begin = self.tick();
        for block in blocks.clone() {
            self.blocks[block as usize].push(Entry::new(version, is_zero, begin));
        }
        let id = WriteId(version.sequence);
        let write = Write {
            version,
            begin,
            cuts: self.durability.cuts(),
            blocks,
            is_swap: false,
            lost: None,
        };
        self.writes.insert(id, write);
        id
    }

    fn acknowledge(&mut self, id: WriteId, is_durable: bool) -> Result<(), Violation> {
        let (begin, _, cuts) = self.names_of(id);
        let write = &self.writes[&id];
        let (version, blocks) = (write.version, write.blocks.clone());
        let now = self.tick();
        for block in blocks.clone() {
            let mut entries = self.blocks[block as usize].iter_mut();
            let entry = entries.find(|e| e.version == version);
            let entry = entry.expect("kept while it is under way");
            entry.acknowledged = Some(now);
            entry.is_durable = is_durable;
        }
        // One that began before a power cut may have been carried out, and lost, before it.
        let is_certain = is_durable || cuts == self.durability.cuts();
        let (port, result) = self.end_write(id, now, is_certain);
        if is_durable {
            for block in blocks.clone() {
                if cuts != self.durability.cuts() {
                    self.replace_survivors(block, begin);
                }
                self.forget_overwritten(block);
            }
        }
        self.fence(port, begin, blocks, now);
        result
    }

    fn end_write(
        &mut self,
        id: WriteId,
        now: u64,
        is_certain: bool,
    ) -> (Port, Result<(), Violation>) {
        let write = self.writes.remove(&id).expect("a write under way");
        let oldest = self.oldest_read().unwrap_or(now);
        let mut result = Ok(());
        let durability = &mut self.durability;
        for block in write.blocks.clone() {
            let entries = &mut self.blocks[block as usize];
            let at = entries.iter().position(|e| e.version == write.version);
            let at = at.expect("kept while it is under way");
            let entry = &mut entries[at];
            entry.end = now;
            entry.first_end = entry.first_end.min(now);
            entry.is_certain |= is_certain;
            result = result.and(check(block, entries, at));
            durability.keep(block, prune(entries, oldest));
        }
        (write.version.writer, result)
    }

    /// When the oldest command began that may still answer what it has read.
    fn oldest_read(&self) -> Option<u64> {
        let swaps = self.writes.values();
        let swaps = swaps.filter(|w| w.is_swap && w.lost.is_none());
        let reads = self.reads.values().next().map(|read| read.begin);
        reads.into_iter().chain(swaps.map(|w| w.begin)).min()
    }

    /// A command of this port that began then, and was about these blocks, has ended: what the port
    /// had lost before has ended too. One of no blocks is a login, which ends all.
    fn fence(&mut self, port: Port, begin: u64, blocks: Range<u64>, now: u64) {
        let is_met = |w: &Write| {
            blocks.is_empty() || w.blocks.start < blocks.end && blocks.start < w.blocks.end
        };
        let is_over = |w: &Write| {
            let is_older = w.lost.is_some_and(|lost| lost < begin);
            w.version.writer == port && is_older && (!self.by_block || is_met(w))
        };
        let over: Vec<WriteId> = self
            .writes
            .iter()
            .filter_map(|(id, write)| is_over(write).then_some(*id))
            .collect();
        for id in over {
            let _ = self.end_write(id, now, false);
        }
    }

    /// The version that the bytes of a block name.
    fn version_of(&self, block: u64, bytes: &[u8]) -> Result<Version, Violation> {
        let Some(seen) = Version::of(block, bytes) else {
            let said = u64::from_be_bytes(bytes[8..16].try_into().expect("eight bytes"));
            let said = Version {
                sequence: said >> 16,
                writer: Port(said as u16),
            };
            let mut whole = [0; BLOCK];
            said.fill(block, &mut whole);
            let byte = whole.iter().zip(bytes).position(|(a, b)| a != b);
            let byte = byte.unwrap_or(0);
            let found = bytes[byte & !7..].first_chunk().expect("a word of a block");
            return Err(Violation::Torn {
                block,
                byte,
                said,
                found: u64::from_be_bytes(*found),
            });
        };
        match seen.sequence > self.sequence {
            true => Err(Violation::Stale { block, seen }),
            false => Ok(seen),
        }
    }

    /// The place of what was read among a block's versions; `None` if several may be meant.
    fn place_of(&self, block: u64, bytes: &[u8]) -> Result<Option<usize>, Violation> {
        let seen = self.version_of(block, bytes)?;
        let is_it = |e: &Entry| match seen == Version::NONE {
            true => e.is_zero,
            false => !e.is_zero && e.version == seen,
        };
        let entries = self.blocks[block as usize].iter();
        let mut places = entries.enumerate().filter(|(_, e)| is_it(e));
        match (places.next(), places.next()) {
            (None, _) => Err(Violation::Stale { block, seen }),
            (Some((at, _)), None) => Ok(Some(at)),
            _ => Ok(None),
        }
    }

    fn see(&mut self, block: u64, bytes: &[u8], (begin, end): (u64, u64)) -> Result<(), Violation> {
        let Some(at) = self.place_of(block, bytes)? else {
            self.survive_as_zeroes(block);
            return Ok(());
        };
        let repeats = self.repeats;
        let entries = &mut self.blocks[block as usize];
        entries[at].on_read(begin, end, repeats);
        check(block, entries, at)?;
        self.survive(block, at);
        Ok(())
    }

    /// A write that began then was let through because the block had this content.
    fn swap(&mut self, block: u64, expected: &[u8], begin: u64) -> Result<(), Violation> {
        let Some(at) = self.place_of(block, expected)? else {
            return Ok(());
        };
        let entry = &mut self.blocks[block as usize][at];
        // One that may be repeated until it ends may have been there twice, and so may one that a
        // power cut has brought back.
        let is_once = entry.end < begin && entry.origin.is_none();
        let version = entry.version;
        match std::mem::replace(&mut entry.is_swapped, is_once) && is_once {
            true => Err(Violation::SwappedTwice { block, version }),
            false => Ok(()),
        }
    }
}

/// Whether a version of a block goes together with the others.
fn check(block: u64, entries: &[Entry], at: usize) -> Result<(), Violation> {
    let entry = &entries[at];
    match entries.iter().find(|other| entry.conflicts(other)) {
        None => Ok(()),
        Some(other) => Err(Violation::Disorder {
            block,
            versions: [entry.version, other.version],
            zones: [entry.zone(), other.zone()],
        }),
    }
}

/// Forgets versions that can neither be read again nor stand against one that can: another version
/// came wholly after them and before each read that has not ended. Who reads one of them reads what
/// was overwritten; a zone that reaches from theirs to the present contains that other version's.
/// Returns them.
fn prune(entries: &mut Vec<Entry>, oldest_read: u64) -> Vec<Entry> {
    let newest = entries
        .iter()
        .filter(|e| e.is_certain && e.end != u64::MAX && e.zone().1 < oldest_read)
        .map(|e| e.zone().0)
        .max();
    let Some(newest) = newest else {
        return Vec::new();
    };
    let is_over = |e: &mut Entry| e.end != u64::MAX && e.zone().1 < newest;
    entries.extract_if(.., is_over).collect()
}

#[cfg(test)]
mod tests;
