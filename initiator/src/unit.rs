//! Identity of the logical unit at an address, and detection of lost acknowledged writes.
//!
//! This module does not perform any I/O: [`Check`] creates the commands that identify a unit and
//! parses the responses, [`Snapshot`] is the result, [`Evidence`] evaluates events around a new
//! login, and [`WriteCache`] tracks the contents of a volatile cache.
//!
//! # Unit identity
//! A unit is identified before any other command is started: after each login, and after unit
//! attentions that may indicate a different unit (29h of any kind, CAPACITY DATA HAS CHANGED,
//! INQUIRY DATA HAS CHANGED, REPORTED LUNS DATA HAS CHANGED) or a different cache mode (MODE
//! PARAMETERS CHANGED). Its serial number and designators (VPD pages 80h and 83h, SPC-4 clause 7.8)
//! must be the original ones. Its block size and type of protection must be the same, and its
//! capacity must not have decreased; if it has grown, the original capacity is used. A unit without a serial number and
//! designators must have the same vendor, product and size; its replacement by another such unit is
//! not detected. Note that if a unit changes during a session, we cannot stop commands that were
//! already sent.
//!
//! # Cache loss
//! An acknowledged write without FUA, or with FUA if the unit does not report DPOFUA, may be in a
//! volatile cache (SBC-3 clause 4.15) until the response to a SYNCHRONIZE CACHE that was started
//! after it. If the target may have lost its cache in between, that flush is executed and then
//! reported as failed: this applies to the next flush, once, and to all flushes in flight at the
//! time of the loss. [`Losses`] counts losses for users with several clients. A unit may enable
//! such a cache at any time (WCE in the caching mode page), so every check needs to query it. A
//! process that takes over from a killed one does not know about acknowledged writes, and assumes
//! that there were some. Rules for a lost cache:
//! - **A cache generation is decisive** if the unit has one before and after: page C0h of `riserd`.
//!   The generation changes whenever the memory that contains unwritten data does (the process for
//!   a RAM disk, the kernel's page cache for files and devices). A generation that appears or
//!   disappears also counts as a change.
//! - **POWER ON OCCURRED (29h/01h), DEVICE INTERNAL RESET (29h/04h)**: lost.
//! - **A deferred error** (sense response codes 71h and 73h) that was not recovered: lost. It
//!   belongs to a write that returned GOOD earlier (SPC-4 clause 4.5).
//! - **I_T NEXUS LOSS OCCURRED (29h/07h)** after a login: not lost, because a target that remembers
//!   the old nexus was running throughout. SCSI BUS RESET (29h/02h) and BUS DEVICE RESET FUNCTION
//!   OCCURRED (29h/03h), a logical unit reset, do not affect caches.
//! - **POWER ON, RESET, OR BUS DEVICE RESET OCCURRED (29h/00h)** may represent any of these (SPC-4
//!   annex F). During a session: lost, except for the first one after our own LOGICAL UNIT RESET.
//!   As the first attention after a login it is not evidence, because some targets (tgt, `riserd`)
//!   report it for every new nexus.
//! - No evidence, for example with LIO, which does not establish a unit attention at a login: lost
//!   if a connection was refused in the meantime (the host was available, but the target was not),
//!   or if there was no message from the target for longer than [`REBOOT`], during which a host may
//!   have restarted. A flapping connection recovers earlier, and its flushes do not fail.

#![forbid(unsafe_code)]

use std::fmt;
use std::io::{Error, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use riser_scsi::data::cdb::block_16::FUA;
use riser_scsi::data::vpd;
use riser_scsi::opcode::{Kind, Opcode};
use riser_scsi::sense::{AdditionalSense, SenseKey};

use crate::request::{CHECK_CONDITION, CommandResponse, DataLen, Effect};
use crate::scsi::{CachingPage, Capacity, Command, Identity, Inquiry, VPD_LEN};
use crate::session::{ConnectError, Down, SrpLoginError};

/// A host that was silent for up to this time has not restarted including its targets. A lost iSCSI
/// connection is detected within ten seconds, and re-established within a few seconds.
pub const REBOOT: Duration = Duration::from_secs(20);

/// Maximum number of successive void rounds of queries, after which a unit is treated as
/// unresponsive.
const MAX_VOID: u32 = 32;

/// Identity reported by a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Standard INQUIRY data; `None` if the command was rejected or the unit is missing.
    pub inquiry: Option<Inquiry>,
    /// Serial number and designators.
    pub identity: Identity,
    /// Capacity; `None` if not reported.
    pub capacity: Option<Capacity>,
    /// Generation of its volatile cache; `None` if it has none.
    pub cache: Option<[u8; 16]>,
    /// Volatile cache enabled (WCE); `None` if not reported.
    pub write_cache: Option<bool>,
}

impl Snapshot {
    /// Compares with a later snapshot for the same address.
    ///
    /// # Errors
    /// Returns [`Down::NoIdentity`] if the unit is missing, or no longer reports all of its names,
    /// for example if it was removed during the queries. Returns [`Down::OtherUnit`] for a
    /// different unit, and [`Down::Shrunk`] if the capacity has decreased.
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
            // All units of a target may have the same vendor and product, so the size must
            // distinguish them.
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
            (Some(was), Some(is)) if (was.block_size, was.p_type) != (is.block_size, is.p_type) => {
                Err(Down::OtherUnit)
            }
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

/// Queries to a unit, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// First, because INQUIRY does not report unit attentions (SPC-4 clause 6.6.1), and these must
    /// precede the results.
    Capacity,
    Inquiry,
    Designators,
    Serial,
    Cache,
    Caching,
    /// Again, if the first query failed or its result is doubtful: a target may report REPORTED
    /// LUNS DATA HAS CHANGED for all commands until the unit was identified, as `riserd` does.
    CapacityAtLast,
    /// READ CAPACITY (10), for a unit that does not support READ CAPACITY (16).
    ShortCapacity,
}

/// A round of queries to a unit. Starts with [`Check::default`].
#[derive(Clone, Debug)]
pub struct Check {
    step: Step,
    designators: Option<Vec<u8>>,
    /// Standard INQUIRY data as received.
    inquiry: Vec<u8>,
    /// The capacity may be from a different unit.
    is_doubtful: bool,
    /// Number of preceding void rounds.
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
    /// Returns the next command, with room for [`VPD_LEN`] bytes of data.
    #[must_use]
    pub fn command(&self) -> Command {
        let inquiry = |page| Command::inquiry_of(page, VPD_LEN);
        match self.step {
            Step::Inquiry => inquiry(None),
            Step::Designators => inquiry(Some(vpd::DEVICE_IDENTIFICATION)),
            Step::Serial => inquiry(Some(vpd::UNIT_SERIAL_NUMBER)),
            Step::Cache => inquiry(Some(vpd::CACHE_GENERATION)),
            Step::Caching => Command {
                // All queries use the same buffer.
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

    /// Called when an event may indicate a different unit; returns whether this makes the round
    /// void. It does not before the first response, because all names are queried after it.
    /// However, that response may have been sent earlier and received on another channel, so the
    /// capacity is queried again.
    pub fn invalidate(&mut self) -> bool {
        self.is_doubtful = true;
        self.step != Step::Capacity
    }

    /// Restarts after a void round. Returns false after too many successive void rounds, for
    /// example if the unit always responds with a unit attention.
    pub fn restart(&mut self) -> bool {
        *self = Self {
            void: self.void + 1,
            ..Self::default()
        };
        self.void < MAX_VOID
    }

    /// Returns whether a response to [`Self::command`] can be used. An INQUIRY that was neither
    /// executed nor rejected (ILLEGAL REQUEST) leaves the identity unknown, and an unconfirmed
    /// doubtful capacity leaves the size unknown. Other queries do not affect the identity; this
    /// includes the vendor-specific page, for which a target may return anything.
    #[must_use]
    pub fn is_conclusive(&self, response: &CommandResponse) -> bool {
        let is_refused = || {
            let key = response.sense().map(|sense| sense.key);
            response.status == CHECK_CONDITION && key == Some(SenseKey::IllegalRequest)
        };
        let is_of_names = matches!(self.step, Step::Inquiry | Step::Designators | Step::Serial);
        let is_confirmation = self.step == Step::CapacityAtLast && self.found.capacity.is_some();
        response.is_success() || !is_confirmation && (!is_of_names || is_refused())
    }

    /// Processes the response data for [`Self::command`], which is empty if the unit rejected it;
    /// returns whether there is another query.
    pub fn process_response(&mut self, data: &[u8]) -> bool {
        self.step = match self.step {
            Step::Capacity => {
                self.found.capacity = Capacity::parse(data).ok();
                Step::Inquiry
            }
            Step::Inquiry => {
                self.found.inquiry = Inquiry::parse(data);
                self.inquiry = data.to_vec();
                // A LUN without a unit has no pages.
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

    /// Returns whether the unit has reported that it is present.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.found
            .inquiry
            .as_ref()
            .is_some_and(|i| i.qualifier == 0)
    }

    /// Returns the identity reported so far.
    #[must_use]
    pub fn found(&self) -> &Snapshot {
        &self.found
    }

    /// Returns the standard INQUIRY data as received.
    #[must_use]
    pub fn inquiry(&self) -> &[u8] {
        &self.inquiry
    }

    /// Returns the body of the device identification page.
    #[must_use]
    pub fn designators(&self) -> Option<&[u8]> {
        self.designators.as_deref()
    }
}

/// Observations of a target since a unit was last known to be unchanged. See the documentation of
/// the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Time without a message from the target before the last login; `None` without a login.
    pub outage: Option<Duration>,
    /// A connection was refused.
    pub refused: bool,
    is_logged_in: bool,
    /// The last login followed a possible restart.
    was_reboot: bool,
    power_on: bool,
    nexus_loss: bool,
}

impl Evidence {
    /// Discards the evidence collected so far.
    pub fn clear(&mut self) {
        *self = Self {
            // An initial attention may still follow.
            is_logged_in: self.is_logged_in,
            ..Self::default()
        };
    }

    /// Called when a login has succeeded, after this outage if known.
    pub fn on_login(&mut self, outage: Option<Duration>) {
        if self.is_logged_in {
            // Evidence of the previous login remains valid. A loss of nexus reported after this may
            // refer to the nexus of that login.
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

    /// Called when a login failed or a connection was lost for this reason.
    pub fn on_down(&mut self, why: Down) {
        /// Invalid service ID (IBTA volume 1, clause 12.6.7.2): there is no listener.
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

    /// Called when the unit reported a unit attention. `is_own_reset` is set if it was caused by
    /// our own task management.
    pub fn on_attention(&mut self, attention: AdditionalSense, is_own_reset: bool) {
        match (attention.code, attention.qualifier) {
            (0x29, 0x01 | 0x04) => self.power_on = true,
            // Ignore it as the first attention after a login. Earlier evidence remains valid.
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

    /// Returns whether a power-on was reported since the last call.
    pub fn take_power_on(&mut self) -> bool {
        std::mem::take(&mut self.power_on)
    }

    /// Returns whether a unit may have lost its volatile cache. `was` and `is` are the previous and
    /// the current generation.
    #[must_use]
    pub fn is_cache_lost(&self, was: Option<[u8; 16]>, is: Option<[u8; 16]>) -> bool {
        if was.is_some() || is.is_some() {
            return was != is;
        }
        self.power_on || (self.is_reboot() && !self.nexus_loss)
    }
}

/// State of a unit's volatile cache: acknowledged writes that wait for a flush, and losses to
/// report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteCache {
    /// Number of acknowledged writes that may have been cached.
    written: u64,
    /// Number of these writes that are on the medium or known to be lost.
    flushed: u64,
    /// Number of losses of acknowledged writes.
    losses: u64,
    /// Number of acknowledged writes at the last loss, until it is reported.
    lost: Option<u64>,
}

/// Writes covered by a flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushMark {
    written: u64,
    losses: u64,
}

impl WriteCache {
    /// Returns the cache state for a killed process: it may have acknowledged writes since its last
    /// flush.
    #[must_use]
    pub fn inherited() -> Self {
        Self {
            written: 1,
            ..Self::default()
        }
    }

    /// Returns whether a flush must fail.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Returns a mark for a flush that is being started: it covers all writes acknowledged before.
    #[must_use]
    pub fn begin_flush(&self) -> FlushMark {
        FlushMark {
            written: self.written,
            losses: self.losses,
        }
    }

    /// Called when a flush with this mark returned GOOD; returns whether it may be reported as
    /// successful.
    pub fn end_flush(&mut self, mark: FlushMark) -> bool {
        self.flushed = self.flushed.max(mark.written);
        let is_kept = self.lost.is_none() && mark.losses == self.losses;
        // A flush that started before a lost write fails, but does not report the loss of that
        // write.
        self.lost = self.lost.filter(|&lost| mark.written < lost);
        is_kept
    }

    /// Called when a command that modifies the medium returned GOOD.
    pub fn on_written(&mut self) {
        self.written += 1;
    }

    /// Returns whether no write waits for a flush, and no flush must fail.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.written == self.flushed && self.lost.is_none()
    }

    /// Called when the target may have lost its cache; returns whether this affects acknowledged
    /// writes.
    pub fn on_lost(&mut self) -> bool {
        let is_loss = self.written > self.flushed;
        if is_loss {
            self.losses += 1;
            self.lost = Some(self.written);
        }
        self.flushed = self.written;
        is_loss
    }
}

/// Number of times that a unit may have lost acknowledged writes. The engine increments it; each
/// client of the unit compares it with the last value it reported, because a flush reports a loss
/// only once, like `errseq_t` for open files in Linux.
#[derive(Debug, Default)]
pub struct Losses(AtomicU64);

impl Losses {
    /// Counts a loss.
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    /// Returns the current number.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// Returns the state of a unit's cache after the unit has reported whether it has one. Disabling a
/// cache writes its whole content to the medium, but an earlier loss is kept until a flush reports
/// it.
#[must_use]
pub fn update_cache_state(cache: Option<WriteCache>, is_on: Option<bool>) -> Option<WriteCache> {
    match (cache, is_on) {
        (None, Some(true)) => Some(WriteCache::default()),
        (Some(cache), Some(false)) if cache.is_settled() => None,
        (cache, _) => cache,
    }
}

/// Returns whether a command flushes all acknowledged data to the medium: SYNCHRONIZE CACHE (SBC-3
/// clauses 5.25 and 5.26) for the whole medium.
#[must_use]
pub fn is_flush(command: &Command) -> bool {
    let row = Opcode::of(command.cdb.as_bytes());
    row.kind == Kind::Flush && command.effect == Effect::Medium
}

/// Returns whether a command may leave data in a volatile cache: all commands that modify the
/// medium, except for flushes and, if the unit supports FUA (DPOFUA), writes with FUA.
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
                p_type: None,
                p_i_exponent: 0,
            }),
            cache: None,
            write_cache: None,
        }
    }

    #[test]
    fn identity_allows_growth_only() {
        let unit = disk("A", 100);
        assert_eq!(unit.compare(&disk("A", 100)), Ok(()));
        assert_eq!(unit.compare(&disk("A", 101)), Ok(()));
        assert_eq!(unit.compare(&disk("A", 99)), Err(Down::Shrunk));
        assert_eq!(unit.compare(&disk("B", 100)), Err(Down::OtherUnit));
        assert_eq!(unit.compare(&disk("", 100)), Err(Down::NoIdentity));
        assert_eq!(unit.compare(&Snapshot::default()), Err(Down::NoIdentity));
        let mut formatted = disk("A", 100);
        formatted.capacity.as_mut().unwrap().p_type = Some(0);
        assert_eq!(unit.compare(&formatted), Err(Down::OtherUnit));
        assert_eq!(formatted.compare(&formatted), Ok(()));
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

    /// Otherwise, the size of a different unit, or none, would be used for this one.
    #[test]
    fn doubtful_capacity_must_be_confirmed() {
        let mut check = Check::default();
        assert!(!check.invalidate(), "no response yet");
        let mut blocks = [0_u8; 32];
        (blocks[7], blocks[10]) = (99, 2);
        assert!(check.process_response(&blocks));
        assert!(check.process_response(&[0; 36]));
        for _ in [0x83, 0x80, 0xc0, 0x08] {
            assert!(check.process_response(&[]));
        }
        let response = |status| CommandResponse {
            status,
            sense: None,
            transferred: 0,
            overflow: 0,
        };
        assert!(!check.is_conclusive(&response(CHECK_CONDITION)));
        assert!(check.is_conclusive(&response(GOOD)));
    }

    #[test]
    fn check_fails_after_void_rounds() {
        let mut check = Check::default();
        let rounds = std::iter::repeat_with(|| check.restart());
        assert_eq!(rounds.take_while(|continues| *continues).count(), 31);
    }

    #[test]
    fn rejected_inquiry_yields_no_identity() {
        for response in [&[][..], &[0x7f; 96]] {
            let mut check = Check::default();
            assert!(check.process_response(&[]));
            assert!(!check.process_response(response));
            assert_eq!(check.found().identity, Identity::default());
            assert_eq!(disk("A", 1).compare(check.found()), Err(Down::NoIdentity));
        }
    }

    /// A target may reject all commands except INQUIRY until the unit was identified.
    #[test]
    fn unknown_capacity_is_queried_again() {
        let mut check = Check::default();
        let capacity = check.command();
        assert!(!check.invalidate());
        assert!(check.process_response(&[]));
        assert!(check.invalidate());
        assert!(check.process_response(&[0; 96]), "its names");
        for _ in 0..4 {
            assert!(check.process_response(&[]));
        }
        assert_eq!(check.command(), capacity);
        let mut blocks = [0; 32];
        (blocks[7], blocks[10]) = (99, 2);
        assert!(!check.process_response(&blocks));
        assert_eq!(check.found().capacity.as_ref().unwrap().blocks, 100);
    }

    fn seen(attentions: &[u8]) -> Evidence {
        let mut evidence = Evidence::default();
        report_attentions(&mut evidence, attentions);
        evidence
    }

    fn reset(qualifier: u8) -> AdditionalSense {
        let code = 0x29;
        AdditionalSense { code, qualifier }
    }

    fn report_attentions(evidence: &mut Evidence, attentions: &[u8]) {
        for qualifier in attentions {
            evidence.on_attention(reset(*qualifier), false);
        }
    }

    #[test]
    fn cache_generation_determines_loss() {
        let (one, two) = (Some([1; 16]), Some([2; 16]));
        for attentions in [&[][..], &[0], &[1], &[7]] {
            assert!(!seen(attentions).is_cache_lost(one, one));
            assert!(seen(attentions).is_cache_lost(one, two));
            assert!(seen(attentions).is_cache_lost(one, None));
            assert!(seen(attentions).is_cache_lost(None, two));
        }
    }

    #[test]
    fn attentions_and_outage_determine_loss() {
        let after = |attentions: &[u8], outage| {
            let mut evidence = Evidence::default();
            evidence.on_login(Some(Duration::from_secs(outage)));
            report_attentions(&mut evidence, attentions);
            evidence
        };
        let is_lost = |e: Evidence| e.is_cache_lost(None, None);
        // A flap: LIO reports nothing, tgt starts with 29h/00h, other targets report the lost
        // nexus.
        for attentions in [&[][..], &[0], &[7], &[2], &[3]] {
            assert!(!is_lost(after(attentions, 15)));
        }
        // A restart: reported, or a long absence of the host, or a portal without a listener.
        assert!(is_lost(after(&[1], 1)));
        assert!(is_lost(after(&[4], 1)));
        assert!(is_lost(after(&[], 21)));
        assert!(is_lost(after(&[0], 21)));
        assert!(!is_lost(after(&[7], 21)));
        let mut refused = after(&[], 1);
        refused.on_down(Down::Connect(ConnectError::Tcp(111)));
        assert!(is_lost(refused));
        // During a session.
        assert!(is_lost(seen(&[0])));
        assert!(is_lost(seen(&[1])));
        assert!(!is_lost(seen(&[3])));
        assert!(!is_lost(seen(&[])));
        // A following login does not invalidate it.
        let mut reset = seen(&[0]);
        reset.on_login(Some(Duration::from_millis(1)));
        report_attentions(&mut reset, &[7]);
        assert!(is_lost(reset));
    }

    /// Some targets report it with the code that may also indicate a power-on.
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

    /// The lost nexus reported after the second login is the nexus of the first login, after the
    /// restart.
    #[test]
    fn second_login_keeps_earlier_evidence() {
        let is_lost = |e: Evidence| e.is_cache_lost(None, None);
        let mut away = Evidence::default();
        away.on_login(Some(Duration::from_secs(60)));
        // The unit was not ready yet.
        away.on_login(Some(Duration::from_secs(61)));
        report_attentions(&mut away, &[7]);
        assert!(is_lost(away));
        let mut refused = Evidence::default();
        refused.on_down(Down::Connect(ConnectError::Tcp(111)));
        refused.on_login(Some(Duration::from_secs(1)));
        refused.on_login(Some(Duration::from_secs(2)));
        report_attentions(&mut refused, &[7]);
        assert!(is_lost(refused));
        // A target that was running throughout.
        let mut there = Evidence::default();
        there.on_login(Some(Duration::from_secs(60)));
        report_attentions(&mut there, &[7]);
        there.on_login(Some(Duration::from_secs(61)));
        report_attentions(&mut there, &[7]);
        assert!(!is_lost(there));
    }

    #[test]
    fn cache_tracking_starts_when_enabled() {
        let cache = update_cache_state(None, Some(true));
        assert_eq!(cache, Some(WriteCache::default()));
        assert_eq!(update_cache_state(None, Some(false)), None);
        assert_eq!(update_cache_state(None, None), None);
        let mut cache = cache.unwrap();
        cache.on_written();
        assert_eq!(update_cache_state(Some(cache), Some(true)), Some(cache));
        assert_eq!(
            update_cache_state(Some(cache), Some(false)),
            Some(cache),
            "a write waits"
        );
        cache.on_lost();
        assert_eq!(
            update_cache_state(Some(cache), Some(false)),
            Some(cache),
            "one is lost"
        );
        assert!(!cache.end_flush(cache.begin_flush()));
        assert_eq!(update_cache_state(Some(cache), Some(false)), None);
        // This is the last query of the check.
        let mut check = Check::default();
        let mut data = vec![0; 36];
        data[..8].copy_from_slice(&[0, 0, 6, 2, 31, 0, 0, 2]);
        let mut capacity = [0; 32];
        capacity[10] = 2;
        for response in [&capacity[..], &data, &[], &[], &[]] {
            assert!(check.process_response(response));
        }
        assert_eq!(check.command().cdb.opcode(), 0x1a);
        assert!(!check.process_response(&[15, 0, 0, 0, 8, 10, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
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
    fn flush_fails_once_after_covered_loss() {
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
    fn flushes_in_flight_at_loss_fail() {
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
    fn flush_before_lost_write_keeps_loss() {
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
