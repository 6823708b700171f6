//! Identity of the logical unit behind an address, and proof that it still has what it
//! acknowledged.
//!
//! No I/O here: [`Check`] makes the commands that identify a unit and reads the answers,
//! [`Snapshot`] is the result, [`Evidence`] weighs what was seen of a new login, [`WriteCache`]
//! tracks what a volatile cache may hold.
//!
//! # The same unit
//! After every login, and after every unit attention that can mean another unit (29h of any kind,
//! CAPACITY DATA HAS CHANGED, INQUIRY DATA HAS CHANGED, REPORTED LUNS DATA HAS CHANGED) or another
//! mode of its cache (MODE PARAMETERS CHANGED), a unit is identified before any other command
//! starts. Its serial number and designators (VPD pages 80h and 83h, SPC-4 clause 7.8) must be
//! those of the first time. Its block size must be the same, and its capacity at least as large: one
//! that has grown is used as far as before. A unit without serial number and designators must be of
//! the same vendor, product and size; one that is exchanged for another such unit is not noticed.
//! Commands that were already sent when a unit changes in the
//! middle of a session are out of reach.
//!
//! # The same cache
//! A write without FUA that is answered, or with FUA by a unit that does not report DPOFUA, may be
//! in a volatile cache (SBC-3 clause 4.15) until a SYNCHRONIZE CACHE that began after it is answered.
//! If the target may have lost its cache between the two, that flush is carried out and then reported
//! as failed: the next flush, once, and every flush that was in flight at the time. [`Losses`]
//! counts losses for users with several clients. A unit may get such a cache at any time (WCE of the
//! caching mode page): each check finds out. A process that takes over from one that was killed
//! does not know what that one had acknowledged, and takes it that something was. Whether a target
//! may have lost its cache:
//! - **A cache generation decides** where the unit offers one before and after: page C0h of
//!   `riserd`, which is another whenever what unwritten data live in is (the process for a RAM
//!   disk, the kernel's page cache for files and devices). One that appears or disappears is
//!   another.
//! - **POWER ON OCCURRED (29h/01h), DEVICE INTERNAL RESET (29h/04h)**: lost.
//! - **A deferred error** (sense response codes 71h and 73h), unless it was recovered: lost. It
//!   belongs to a write that returned GOOD earlier (SPC-4 clause 4.5).
//! - **I_T NEXUS LOSS OCCURRED (29h/07h)** after a login: not lost, since a target that knows the
//!   old nexus has been there all the time. SCSI BUS RESET (29h/02h) and BUS DEVICE RESET FUNCTION
//!   OCCURRED (29h/03h), a logical unit reset, leave caches alone.
//! - **POWER ON, RESET, OR BUS DEVICE RESET OCCURRED (29h/00h)** may stand for each of these (SPC-4
//!   annex F). In the middle of a session: lost, except for the first one after a LOGICAL UNIT RESET
//!   of our own. As the first thing after a login it says nothing,
//!   since there are targets (tgt, `riserd`) that greet each new nexus with it.
//! - Nothing that says anything, as from LIO, which raises no attention at a login: lost, if a
//!   connection was refused meanwhile (something was there and did not serve), or if the target was
//!   not heard of for longer than [`REBOOT`], in which a host may have restarted. A connection that
//!   flaps is back sooner, and keeps its flushes.

#![forbid(unsafe_code)]

use std::fmt;
use std::io::{Error, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use riser_scsi::data::cdb::block_16::FUA;
use riser_scsi::data::vpd;
use riser_scsi::opcode::{Kind, Opcode};
use riser_scsi::sense::{AdditionalSense, SenseKey};

use crate::request::{Answer, CHECK_CONDITION, DataLen, Effect};
use crate::scsi::{CachingPage, Capacity, Command, Identity, Inquiry, VPD_LEN};
use crate::session::{ConnectError, Down, SrpLoginError};

/// A host that was silent for no longer has not restarted with its targets. A lost connection of
/// iSCSI is noticed within ten seconds, and made again within a few.
pub const REBOOT: Duration = Duration::from_secs(20);

/// Void rounds of questions in a row, after which a unit counts as one that does not answer.
const MAX_VOID: u32 = 32;

/// Identity that a unit reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Standard INQUIRY data; `None` where it refused, or is not there.
    pub inquiry: Option<Inquiry>,
    /// Serial number and designators.
    pub identity: Identity,
    /// Its size; `None` where it did not say.
    pub capacity: Option<Capacity>,
    /// The generation of its volatile cache; `None` where it offers none.
    pub cache: Option<[u8; 16]>,
    /// It has a volatile cache (WCE); `None` where it did not say.
    pub write_cache: Option<bool>,
}

impl Snapshot {
    /// Compares with what was found later at the same address.
    ///
    /// # Errors
    /// [`Down::NoIdentity`]: nothing is there, or it does not report all of its names any more, as
    /// where it was taken away in the middle of the questions. [`Down::OtherUnit`]: another unit.
    /// [`Down::Shrunk`]: the unit with less capacity.
    pub fn compare(&self, found: &Self) -> Result<(), Down> {
        let Some(inquiry) = found.inquiry.as_ref().filter(|i| i.qualifier == 0) else {
            return Err(Down::NoIdentity);
        };
        let is_same_make =
            |i: &Inquiry| (&i.vendor, &i.product) == (&inquiry.vendor, &inquiry.product);
        if found.identity.is_part_of(&self.identity) {
            return Err(Down::NoIdentity);
        }
        let is_same = match self.identity == Identity::default() {
            // All units of a target may be of one make: their size is what tells them apart.
            true => {
                let sizes = self.capacity.as_ref().zip(found.capacity.as_ref());
                self.inquiry.as_ref().is_none_or(is_same_make)
                    && sizes.is_none_or(|(was, is)| was.blocks == is.blocks)
            }
            false => true,
        };
        if !is_same || self.identity != found.identity {
            return Err(Down::OtherUnit);
        }
        match (&self.capacity, &found.capacity) {
            (Some(was), Some(is)) if was.block_size != is.block_size => Err(Down::OtherUnit),
            (Some(was), Some(is)) if is.blocks < was.blocks => Err(Down::Shrunk),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let identity = &self.identity;
        if let Some(inquiry) = &self.inquiry {
            write!(f, "{} {}", inquiry.vendor, inquiry.product)?;
        }
        if let Some(serial) = &identity.serial {
            write!(f, ", serial {serial}")?;
        }
        let names = [&identity.naa, &identity.eui, &identity.name, &identity.t10];
        if let Some(name) = names.into_iter().flatten().next() {
            write!(f, ", {name}")?;
        }
        if let Some(capacity) = &self.capacity {
            write!(
                f,
                ", {} blocks of {} bytes",
                capacity.blocks, capacity.block_size
            )?;
        }
        Ok(())
    }
}

/// Questions to a unit, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// First, since INQUIRY does not report unit attentions (SPC-4 clause 6.6.1), and what they say
    /// comes before what is found.
    Capacity,
    Inquiry,
    Designators,
    Serial,
    Cache,
    Caching,
    /// Again, where the first answer was none, or is doubtful: a target may report REPORTED LUNS DATA
    /// HAS CHANGED to every command until it has named the unit, as `riserd` does.
    CapacityAtLast,
    /// READ CAPACITY (10), for a unit without the longer form.
    ShortCapacity,
}

/// One round of questions to a unit. Begins with [`Check::default`].
#[derive(Clone, Debug)]
pub struct Check {
    step: Step,
    designators: Option<Vec<u8>>,
    /// Standard INQUIRY data as received.
    inquiry: Vec<u8>,
    /// The capacity may be that of another unit.
    is_doubtful: bool,
    /// Rounds before this one that were void.
    void: u32,
    found: Snapshot,
}

impl Default for Check {
    fn default() -> Self {
        Self {
            step: Step::Capacity,
            designators: None,
            inquiry: Vec::new(),
            is_doubtful: false,
            void: 0,
            found: Snapshot::default(),
        }
    }
}

impl Check {
    /// The command to send next, with room for [`VPD_LEN`] bytes of data.
    #[must_use]
    pub fn command(&self) -> Command {
        let inquiry = |page| Command::inquiry_of(page, VPD_LEN);
        match self.step {
            Step::Inquiry => inquiry(None),
            Step::Designators => inquiry(Some(vpd::DEVICE_IDENTIFICATION)),
            Step::Serial => inquiry(Some(vpd::UNIT_SERIAL_NUMBER)),
            Step::Cache => inquiry(Some(vpd::CACHE_GENERATION)),
            Step::Caching => Command {
                // The buffer is the same for every question.
                len: DataLen::In(VPD_LEN.into()),
                ..Command::mode_sense_caching()
            },
            Step::Capacity | Step::CapacityAtLast => Command::read_capacity_of(VPD_LEN.into()),
            Step::ShortCapacity => Command {
                len: DataLen::In(VPD_LEN.into()),
                ..Command::read_capacity_10()
            },
        }
    }

    /// Something has happened that may mean another unit; returns whether the round is void by that.
    /// It is not before the first answer, since all names come after it. That answer may have been
    /// given before, though, and come by another channel, so the capacity is asked for again.
    pub fn doubt(&mut self) -> bool {
        self.is_doubtful = true;
        self.step != Step::Capacity
    }

    /// Begins again after a round that is void. Returns false where that was too often in a row, as
    /// where the unit answers with an attention every time.
    pub fn begin_again(&mut self) -> bool {
        *self = Self {
            void: self.void + 1,
            ..Self::default()
        };
        self.void < MAX_VOID
    }

    /// Returns whether an answer to [`Self::command`] may be taken. An INQUIRY that is neither
    /// carried out nor refused (ILLEGAL REQUEST) leaves the identity open, as the size is left open
    /// where a doubtful one is not confirmed. The other questions are not about that, nor is the
    /// vendor specific page, to which some target may answer anything.
    #[must_use]
    pub fn is_conclusive(&self, answer: &Answer) -> bool {
        let is_refused = || {
            let key = answer.sense().map(|sense| sense.key);
            answer.status == CHECK_CONDITION && key == Some(SenseKey::IllegalRequest)
        };
        let is_of_names = matches!(self.step, Step::Inquiry | Step::Designators | Step::Serial);
        let is_confirmation = self.step == Step::CapacityAtLast && self.found.capacity.is_some();
        answer.is_success() || !is_confirmation && (!is_of_names || is_refused())
    }

    /// Takes the data of the answer to [`Self::command`], none where the unit refused; whether
    /// there is another question.
    pub fn take(&mut self, data: &[u8]) -> bool {
        self.step = match self.step {
            Step::Capacity => {
                self.found.capacity = Capacity::parse(data).ok();
                Step::Inquiry
            }
            Step::Inquiry => {
                self.found.inquiry = Inquiry::parse(data);
                self.inquiry = data.to_vec();
                // A number without a unit has no pages to ask for.
                if !self.is_there() {
                    return false;
                }
                Step::Designators
            }
            Step::Designators => {
                self.designators = vpd::body(data, vpd::DEVICE_IDENTIFICATION).map(<[u8]>::to_vec);
                Step::Serial
            }
            Step::Serial => {
                let designators = self.designators.as_deref();
                self.found.identity =
                    Identity::parse(vpd::body(data, vpd::UNIT_SERIAL_NUMBER), designators);
                Step::Cache
            }
            Step::Cache => {
                self.found.cache =
                    vpd::body(data, vpd::CACHE_GENERATION).and_then(vpd::cache_generation);
                Step::Caching
            }
            Step::Caching => {
                self.found.write_cache = CachingPage::parse(data).map(|page| page.write_cache);
                if self.found.capacity.is_some() && !self.is_doubtful {
                    return false;
                }
                Step::CapacityAtLast
            }
            Step::CapacityAtLast => {
                self.found.capacity = Capacity::parse(data).ok();
                if self.found.capacity.is_some() {
                    return false;
                }
                Step::ShortCapacity
            }
            Step::ShortCapacity => {
                self.found.capacity = Capacity::parse_10(data).ok();
                return false;
            }
        };
        true
    }

    /// Returns whether the unit has said that it is there.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.found
            .inquiry
            .as_ref()
            .is_some_and(|i| i.qualifier == 0)
    }

    /// Identity that the unit has reported so far.
    #[must_use]
    pub fn found(&self) -> &Snapshot {
        &self.found
    }

    /// Standard INQUIRY data as received.
    #[must_use]
    pub fn inquiry(&self) -> &[u8] {
        &self.inquiry
    }

    /// The body of the device identification page.
    #[must_use]
    pub fn designators(&self) -> Option<&[u8]> {
        self.designators.as_deref()
    }
}

/// Observations of a target since a unit was last known to be the same. See the module's
/// documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Duration for which the target was not heard of before it was logged in to again; `None`
    /// without a login.
    pub outage: Option<Duration>,
    /// A connection was refused.
    pub refused: bool,
    is_logged_in: bool,
    /// Whether the last login followed what may have been a restart.
    was_reboot: bool,
    power_on: bool,
    nexus_loss: bool,
}

impl Evidence {
    /// What was seen so far says nothing of what is to be judged from now on.
    pub fn forget(&mut self) {
        *self = Self {
            // A greeting may still be to come.
            is_logged_in: self.is_logged_in,
            ..Self::default()
        };
    }

    /// A login has succeeded, after this outage if that is known.
    pub fn on_login(&mut self, outage: Option<Duration>) {
        if self.is_logged_in {
            // What the login before has shown stays true. A nexus whose loss is reported from now on
            // may be the one of that login.
            self.power_on |= self.was_reboot && !self.nexus_loss;
            self.nexus_loss = false;
        }
        (self.outage, self.is_logged_in) = (outage, true);
        self.was_reboot = self.is_reboot();
    }

    fn is_reboot(&self) -> bool {
        let is_reboot = |outage| self.refused || outage > REBOOT;
        self.outage.is_some_and(is_reboot)
    }

    /// A login failed, or a connection was lost, for this reason.
    pub fn on_down(&mut self, why: Down) {
        /// Invalid service ID (IBTA volume 1, clause 12.6.7.2): nothing listens there.
        const NO_LISTENER: u16 = 8;
        let is_refused =
            |error| Error::from_raw_os_error(error).kind() == ErrorKind::ConnectionRefused;
        self.refused |= match why {
            Down::Connect(ConnectError::Tcp(error)) => is_refused(error),
            Down::Connect(ConnectError::Login(error)) => {
                error == SrpLoginError::Refused(NO_LISTENER)
            }
            _ => false,
        };
    }

    /// The unit reported a unit attention. `is_own_reset` if our own task management caused it.
    pub fn on_attention(&mut self, attention: AdditionalSense, is_own_reset: bool) {
        match (attention.code, attention.qualifier) {
            (0x29, 0x01 | 0x04) => self.power_on = true,
            // Not as the first thing after a login. What was seen before one stays true.
            (0x29, 0x00) => self.power_on |= !self.is_logged_in && !is_own_reset,
            (0x29, 0x07) => self.nexus_loss = true,
            _ => {}
        }
    }

    /// Returns whether the unit has reported a power-on.
    #[must_use]
    pub fn has_powered_on(&self) -> bool {
        self.power_on
    }

    /// Returns whether a power-on was seen that was not judged yet, and forgets it.
    pub fn take_power_on(&mut self) -> bool {
        std::mem::take(&mut self.power_on)
    }

    /// Returns whether a unit may have lost its volatile cache, whose generation was `was` and is
    /// `is`.
    #[must_use]
    pub fn is_cache_lost(&self, was: Option<[u8; 16]>, is: Option<[u8; 16]>) -> bool {
        if was.is_some() || is.is_some() {
            return was != is;
        }
        self.power_on || (self.is_reboot() && !self.nexus_loss)
    }
}

/// Volatile cache of a unit: acknowledged writes that wait for a flush, and losses that one
/// reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteCache {
    /// Writes acknowledged that may be in the cache.
    written: u64,
    /// Number of them that are on the medium, or known to be lost.
    settled: u64,
    /// Number of times that acknowledged writes were lost.
    losses: u64,
    /// Writes that had been acknowledged at the last loss, until that is reported.
    lost: Option<u64>,
}

/// Writes that a flush covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushMark {
    written: u64,
    losses: u64,
}

impl WriteCache {
    /// The books of a process that was killed: writes may have been acknowledged since its last
    /// flush.
    #[must_use]
    pub fn inherited() -> Self {
        Self {
            written: 1,
            ..Self::default()
        }
    }

    /// Returns whether a flush has to fail.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// A mark for a flush that begins now: it covers what was acknowledged before.
    #[must_use]
    pub fn begin_flush(&self) -> FlushMark {
        FlushMark {
            written: self.written,
            losses: self.losses,
        }
    }

    /// A flush that began at `mark` was answered GOOD; whether it may be reported so.
    pub fn end_flush(&mut self, mark: FlushMark) -> bool {
        self.settled = self.settled.max(mark.written);
        let is_kept = self.lost.is_none() && mark.losses == self.losses;
        // One that began before a write that was lost fails, but does not report the loss of that
        // write.
        self.lost = self.lost.filter(|&lost| mark.written < lost);
        is_kept
    }

    /// A command that changes the medium was answered GOOD.
    pub fn on_written(&mut self) {
        self.written += 1;
    }

    /// Returns whether nothing waits for a flush, and none has to fail.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.written == self.settled && self.lost.is_none()
    }

    /// The target may have lost its cache; returns whether that affects acknowledged writes.
    pub fn on_lost(&mut self) -> bool {
        let is_loss = self.written > self.settled;
        if is_loss {
            self.losses += 1;
            self.lost = Some(self.written);
        }
        self.settled = self.written;
        is_loss
    }
}

/// Number of times that a unit may have lost acknowledged writes. The engine counts; each client of
/// the unit compares with the number that it was last notified of, because a flush reports a loss
/// only once, as `errseq_t` does in Linux for open files.
#[derive(Debug, Default)]
pub struct Losses(AtomicU64);

impl Losses {
    /// Counts a loss.
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    /// Current number.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// The state of a unit's cache, after the unit has reported whether it has one. Switching a cache
/// off writes everything that it holds, but a loss before that is kept until a flush reports it.
#[must_use]
pub fn books(cache: Option<WriteCache>, is_on: Option<bool>) -> Option<WriteCache> {
    match (cache, is_on) {
        (None, Some(true)) => Some(WriteCache::default()),
        (Some(cache), Some(false)) if cache.is_settled() => None,
        (cache, _) => cache,
    }
}

/// Returns whether a command puts everything that was acknowledged onto the medium: SYNCHRONIZE
/// CACHE (SBC-3 clauses 5.25 and 5.26) of the whole medium.
#[must_use]
pub fn is_flush(command: &Command) -> bool {
    let row = Opcode::of(command.cdb.as_bytes());
    row.kind == Kind::Flush && command.effect == Effect::Medium
}

/// Returns whether a command leaves something in a volatile cache: all that change the medium,
/// but for flushes and, if the unit supports FUA (DPOFUA), writes with FUA.
#[must_use]
pub fn is_cached(command: &Command, has_fua: bool) -> bool {
    const WITH_FUA: [&Opcode; 3] = [
        Opcode::named("WRITE (10)"),
        Opcode::named("WRITE (12)"),
        Opcode::named("WRITE (16)"),
    ];
    let cdb = command.cdb.as_bytes();
    let row = Opcode::of(cdb);
    match WITH_FUA.iter().any(|with_fua| row.is(with_fua)) {
        true => !has_fua || FUA.get(cdb) != Some(true),
        false => command.effect.is_change() && !is_flush(command),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::GOOD;

    fn disk(serial: &str, blocks: u64) -> Snapshot {
        Snapshot {
            inquiry: Some(Inquiry {
                vendor: "V".into(),
                product: "P".into(),
                ..Inquiry::default()
            }),
            identity: Identity {
                serial: Some(serial.into()).filter(|s: &String| !s.is_empty()),
                ..Identity::default()
            },
            capacity: Some(Capacity {
                blocks,
                block_size: 512,
                physical_exponent: 0,
                provisioning: false,
                reads_zeroes: false,
            }),
            cache: None,
            write_cache: None,
        }
    }

    #[test]
    fn a_unit_is_known_by_its_names_and_may_only_grow() {
        let unit = disk("A", 100);
        assert_eq!(unit.compare(&disk("A", 100)), Ok(()));
        assert_eq!(unit.compare(&disk("A", 101)), Ok(()));
        assert_eq!(unit.compare(&disk("A", 99)), Err(Down::Shrunk));
        assert_eq!(unit.compare(&disk("B", 100)), Err(Down::OtherUnit));
        assert_eq!(unit.compare(&disk("", 100)), Err(Down::NoIdentity));
        assert_eq!(unit.compare(&Snapshot::default()), Err(Down::NoIdentity));
        let mut named = disk("A", 100);
        named.identity.naa = Some("6001".into());
        assert_eq!(named.compare(&unit), Err(Down::NoIdentity));
        assert_eq!(named.compare(&disk("B", 100)), Err(Down::OtherUnit));
        assert_eq!(unit.compare(&named), Err(Down::OtherUnit));
        let nameless = disk("", 100);
        assert_eq!(nameless.compare(&disk("", 100)), Ok(()));
        for blocks in [99, 101] {
            let other = nameless.compare(&disk("", blocks));
            assert_eq!(other, Err(Down::OtherUnit), "{blocks}");
        }
        assert_eq!(nameless.compare(&disk("A", 100)), Err(Down::OtherUnit));
        let mut other_make = disk("", 100);
        other_make.inquiry.as_mut().unwrap().product = "Q".into();
        assert_eq!(nameless.compare(&other_make), Err(Down::OtherUnit));
        let mut other_blocks = disk("A", 100);
        other_blocks.capacity.as_mut().unwrap().block_size = 4096;
        assert_eq!(unit.compare(&other_blocks), Err(Down::OtherUnit));
    }

    /// Else the size of another unit, or none, would be taken for that of this one.
    #[test]
    fn a_doubtful_capacity_must_be_confirmed() {
        let mut check = Check::default();
        assert!(!check.doubt(), "nothing is answered yet");
        let mut blocks = [0_u8; 32];
        (blocks[7], blocks[10]) = (99, 2);
        assert!(check.take(&blocks));
        assert!(check.take(&[0; 36]));
        for _ in [0x83, 0x80, 0xc0, 0x08] {
            assert!(check.take(&[]));
        }
        let answer = |status| Answer {
            status,
            sense: None,
            transferred: 0,
            overflow: 0,
        };
        assert!(!check.is_conclusive(&answer(CHECK_CONDITION)));
        assert!(check.is_conclusive(&answer(GOOD)));
    }

    #[test]
    fn a_unit_whose_every_round_is_void_is_given_up() {
        let mut check = Check::default();
        let rounds = std::iter::repeat_with(|| check.begin_again());
        assert_eq!(rounds.take_while(|goes_on| *goes_on).count(), 31);
    }

    #[test]
    fn a_unit_that_refuses_inquiry_has_no_identity() {
        for answer in [&[][..], &[0x7f; 96]] {
            let mut check = Check::default();
            assert!(check.take(&[]));
            assert!(!check.take(answer));
            assert_eq!(check.found().identity, Identity::default());
            assert_eq!(disk("A", 1).compare(check.found()), Err(Down::NoIdentity));
        }
    }

    /// A target may answer nothing but INQUIRY until it has named the unit.
    #[test]
    fn a_capacity_that_is_not_known_at_first_is_asked_for_again() {
        let mut check = Check::default();
        let capacity = check.command();
        assert!(!check.doubt());
        assert!(check.take(&[]));
        assert!(check.doubt());
        assert!(check.take(&[0; 96]), "its names");
        for _ in 0..4 {
            assert!(check.take(&[]));
        }
        assert_eq!(check.command(), capacity);
        let mut blocks = [0; 32];
        (blocks[7], blocks[10]) = (99, 2);
        assert!(!check.take(&blocks));
        assert_eq!(check.found().capacity.as_ref().unwrap().blocks, 100);
    }

    fn seen(attentions: &[u8]) -> Evidence {
        let mut evidence = Evidence::default();
        see(&mut evidence, attentions);
        evidence
    }

    fn reset(qualifier: u8) -> AdditionalSense {
        let code = 0x29;
        AdditionalSense { code, qualifier }
    }

    fn see(evidence: &mut Evidence, attentions: &[u8]) {
        for qualifier in attentions {
            evidence.on_attention(reset(*qualifier), false);
        }
    }

    #[test]
    fn a_generation_decides_whether_a_cache_is_lost() {
        let (one, two) = (Some([1; 16]), Some([2; 16]));
        for attentions in [&[][..], &[0], &[1], &[7]] {
            assert!(!seen(attentions).is_cache_lost(one, one));
            assert!(seen(attentions).is_cache_lost(one, two));
            assert!(seen(attentions).is_cache_lost(one, None));
            assert!(seen(attentions).is_cache_lost(None, two));
        }
    }

    #[test]
    fn without_a_generation_attentions_and_the_outage_decide() {
        let after = |attentions: &[u8], outage| {
            let mut evidence = Evidence::default();
            evidence.on_login(Some(Duration::from_secs(outage)));
            see(&mut evidence, attentions);
            evidence
        };
        let is_lost = |e: Evidence| e.is_cache_lost(None, None);
        // A flap: LIO says nothing, tgt begins with 29h/00h, others report the lost nexus.
        for attentions in [&[][..], &[0], &[7], &[2], &[3]] {
            assert!(!is_lost(after(attentions, 15)));
        }
        // A restart: said, or a host that was away for long, or a portal without a listener.
        assert!(is_lost(after(&[1], 1)));
        assert!(is_lost(after(&[4], 1)));
        assert!(is_lost(after(&[], 21)));
        assert!(is_lost(after(&[0], 21)));
        assert!(!is_lost(after(&[7], 21)));
        let mut refused = after(&[], 1);
        refused.on_down(Down::Connect(ConnectError::Tcp(111)));
        assert!(is_lost(refused));
        // In the middle of a session.
        assert!(is_lost(seen(&[0])));
        assert!(is_lost(seen(&[1])));
        assert!(!is_lost(seen(&[3])));
        assert!(!is_lost(seen(&[])));
        // A login that follows does not undo it.
        let mut reset = seen(&[0]);
        reset.on_login(Some(Duration::from_millis(1)));
        see(&mut reset, &[7]);
        assert!(is_lost(reset));
    }

    /// Some targets report it by the code that may also be a power-on.
    #[test]
    fn own_reset_loses_no_cache() {
        let is_lost = |e: Evidence| e.is_cache_lost(None, None);
        let mut evidence = Evidence::default();
        evidence.on_attention(reset(0), true);
        assert!(!is_lost(evidence));
        evidence.on_attention(reset(0), false);
        assert!(is_lost(evidence), "a second report has another cause");
        let mut power_on = Evidence::default();
        power_on.on_attention(reset(1), true);
        assert!(is_lost(power_on));
    }

    /// The nexus that the second login hears of is that of the first one, after the restart.
    #[test]
    fn a_second_login_does_not_undo_what_the_first_one_has_shown() {
        let is_lost = |e: Evidence| e.is_cache_lost(None, None);
        let mut away = Evidence::default();
        away.on_login(Some(Duration::from_secs(60)));
        // Its unit was not ready yet.
        away.on_login(Some(Duration::from_secs(61)));
        see(&mut away, &[7]);
        assert!(is_lost(away));
        let mut refused = Evidence::default();
        refused.on_down(Down::Connect(ConnectError::Tcp(111)));
        refused.on_login(Some(Duration::from_secs(1)));
        refused.on_login(Some(Duration::from_secs(2)));
        see(&mut refused, &[7]);
        assert!(is_lost(refused));
        // A target that had been there all the time.
        let mut there = Evidence::default();
        there.on_login(Some(Duration::from_secs(60)));
        see(&mut there, &[7]);
        there.on_login(Some(Duration::from_secs(61)));
        see(&mut there, &[7]);
        assert!(!is_lost(there));
    }

    #[test]
    fn books_are_kept_from_the_time_that_a_unit_has_a_cache() {
        let cache = books(None, Some(true));
        assert_eq!(cache, Some(WriteCache::default()));
        assert_eq!(books(None, Some(false)), None);
        assert_eq!(books(None, None), None);
        let mut cache = cache.unwrap();
        cache.on_written();
        assert_eq!(books(Some(cache), Some(true)), Some(cache));
        assert_eq!(
            books(Some(cache), Some(false)),
            Some(cache),
            "a write waits"
        );
        cache.on_lost();
        assert_eq!(books(Some(cache), Some(false)), Some(cache), "one is lost");
        assert!(!cache.end_flush(cache.begin_flush()));
        assert_eq!(books(Some(cache), Some(false)), None);
        // The check asks for it last.
        let mut check = Check::default();
        let mut data = vec![0; 36];
        data[..8].copy_from_slice(&[0, 0, 6, 2, 31, 0, 0, 2]);
        let mut capacity = [0; 32];
        capacity[10] = 2;
        for answer in [&capacity[..], &data, &[], &[], &[]] {
            assert!(check.take(answer));
        }
        assert_eq!(check.command().cdb.opcode(), 0x1a);
        assert!(!check.take(&[15, 0, 0, 0, 8, 10, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
        assert_eq!(check.found().write_cache, Some(true));
    }

    /// A unit without DPOFUA may ignore the bit.
    #[test]
    fn fua_writes_are_cached_without_dpofua() {
        let range = crate::scsi::BlockRange { lba: 0, blocks: 1 };
        let [fua, plain] = [true, false].map(|fua| Command::write(range, 512, fua));
        assert!(is_cached(&fua, false) && !is_cached(&fua, true));
        assert!(is_cached(&plain, true));
        assert!(!is_cached(&Command::synchronize_cache(), true));
    }

    #[test]
    fn a_flush_fails_once_if_what_it_covers_was_lost() {
        let mut cache = WriteCache::default();
        cache.on_lost();
        let mark = cache.begin_flush();
        assert!(cache.end_flush(mark), "nothing was lost");
        cache.on_written();
        let mark = cache.begin_flush();
        cache.on_written();
        assert!(cache.end_flush(mark));
        cache.on_lost();
        assert!(!cache.end_flush(cache.begin_flush()), "the second write");
        assert!(cache.end_flush(cache.begin_flush()));
        cache.on_written();
        assert!(cache.end_flush(cache.begin_flush()));
        cache.on_lost();
        assert!(cache.end_flush(cache.begin_flush()), "it was on the medium");
    }

    #[test]
    fn every_flush_that_was_under_way_at_a_loss_fails() {
        let mut cache = WriteCache::default();
        cache.on_written();
        let (one, other) = (cache.begin_flush(), cache.begin_flush());
        cache.on_lost();
        let later = cache.begin_flush();
        assert!(!cache.end_flush(one));
        assert!(!cache.end_flush(other));
        assert!(cache.end_flush(later), "the loss has been reported");
        assert!(cache.end_flush(cache.begin_flush()));
    }

    #[test]
    fn a_flush_that_does_not_cover_what_was_lost_does_not_report_it() {
        let mut cache = WriteCache::default();
        let early = cache.begin_flush();
        cache.on_written();
        cache.on_lost();
        assert!(!cache.end_flush(early));
        assert!(
            !cache.end_flush(cache.begin_flush()),
            "the first to cover it"
        );
        assert!(cache.end_flush(cache.begin_flush()));
    }
}
