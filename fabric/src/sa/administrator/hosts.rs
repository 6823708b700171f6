//! Hosts that were heard, and those of them that are there.
//!
//! ```text
//!          a request                  its answer to a question
//! (none) ─────────────▶ heard ──────────────────────────────────▶ present
//!    ▲                    │ not heard for FORGETTING, or its place   │ keeps nothing and not heard for
//!    │                    │ is needed                                │ FORGETTING, or does not answer
//!    └────────────────────┴──────────────────────────────────────────┘ MAX_UNANSWERED questions
//! ```
//!
//! The source of a datagram can be forged. So a host is asked something, by a number that only its
//! address receives. What it sets waits for the answer; until then it is in no table, and each of its
//! requests brings one datagram more, no row of them. A host that keeps something and is silent is asked
//! again: it may have been switched off, and what it keeps must not stay for ever. So is one that has
//! registered something at an administrator before a restart.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant};

use riser_transport::verbs::Gid;
use riser_transport::wire::mad::{ClassPortInfo, MadClass, MadHeader, MadMethod};
use riser_transport::wire::{MAD_LEN, Mad, TransactionId, perf};
use rustc_hash::FxHashSet;
use zerocopy::IntoBytes as _;

use super::super::wire::Record as _;

/// Time after which a host is forgotten that keeps nothing, and after which one is asked that does.
pub(super) const FORGETTING: Duration = Duration::from_secs(600);

/// Time between two looks at all hosts.
pub(super) const SWEEP: Duration = Duration::from_secs(60);

/// Questions that a host may leave without an answer, one in each [`SWEEP`]: it is away for an hour.
const MAX_UNANSWERED: u32 = 50;

/// Requests of a host that wait for its answer; it repeats those beyond.
const MAX_WAITING: usize = 8;

/// Requests of a host that are taken over from an earlier administrator: more than a host may keep.
const MAX_RESTORED: usize = 128;

struct Host {
    gid: Gid,
    /// Time at which anything came from its address.
    heard: Instant,
    /// Time of its last answer; none so far.
    answered: Option<Instant>,
    /// Questions since then.
    unanswered: u32,
    /// Requests that wait for its first answer.
    waiting: Vec<Mad>,
    /// Those of an earlier administrator, which it would make again if it knew of the restart.
    restored: Vec<Mad>,
}

impl Host {
    fn new(gid: Gid, now: Instant) -> Self {
        Self {
            gid,
            heard: now,
            answered: None,
            unanswered: 0,
            waiting: Vec::new(),
            restored: Vec::new(),
        }
    }

    /// Whether it has had something before a restart, and has not come back.
    fn is_awaited(&self) -> bool {
        !self.restored.is_empty()
    }
}

/// Requests of a host that has answered.
pub(super) struct Answered {
    /// It was not known to be there.
    pub(super) is_new: bool,
    /// Those of an earlier administrator.
    pub(super) restored: Vec<Mad>,
    /// Its own, which have waited.
    pub(super) waiting: Vec<Mad>,
}

/// A place in the list.
pub(super) enum Place {
    /// The host has one. It may have been that of another one, which was present.
    Taken { left: Option<Gid> },
    /// All are those of hosts that keep something.
    None,
}

/// What is to be done about hosts that are silent.
#[derive(Default)]
pub(super) struct Silent {
    /// Those that are forgotten, and whether they were present.
    pub(super) gone: Vec<(Gid, bool)>,
    /// Those that are asked.
    pub(super) asked: Vec<Gid>,
}

/// The hosts of the fabric.
pub(super) struct Hosts {
    most: usize,
    /// GID of the administrator itself, which is there.
    own: Gid,
    secret: [u8; 16],
    all: Vec<Host>,
    /// Time of the last look at all of them, or of the first host.
    swept: Option<Instant>,
}

impl Hosts {
    pub(super) fn new(most: usize, own: Gid, secret: [u8; 16]) -> Self {
        Self {
            most,
            own,
            secret,
            all: Vec::new(),
            swept: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    fn find(&mut self, gid: Gid) -> Option<&mut Host> {
        self.all.iter_mut().find(|host| host.gid == gid)
    }

    /// Whether a host is there.
    pub(super) fn is_present(&self, gid: Gid) -> bool {
        let is_it = |host: &Host| host.gid == gid && host.answered.is_some();
        self.all.iter().any(is_it)
    }

    /// Hosts that are there.
    pub(super) fn present(&self) -> impl Iterator<Item = Gid> {
        let present = self.all.iter().filter(|host| host.answered.is_some());
        present.map(|host| host.gid)
    }

    /// Notes that something came from a host's address. Where no place is free, one that was only heard
    /// gives way, else one that keeps nothing, for which `keepers` are asked, and at last one that has not
    /// come back after a restart, though it had time for an answer.
    pub(super) fn note(
        &mut self,
        now: Instant,
        gid: Gid,
        keepers: impl FnOnce() -> FxHashSet<Gid>,
    ) -> Place {
        if let Some(host) = self.find(gid) {
            host.heard = now;
            return Place::Taken { left: None };
        }
        let mut left = None;
        if self.all.len() >= self.most {
            let oldest = |may: &dyn Fn(&Host) -> bool| {
                let free = self.all.iter().enumerate().filter(|(_, host)| may(host));
                let free = free.min_by_key(|(_, host)| host.heard);
                free.map(|(at, _)| at)
            };
            let was_heard = |host: &Host| host.answered.is_none() && !host.is_awaited();
            let free = oldest(&was_heard).or_else(|| {
                let keepers = keepers();
                let is_free = |host: &Host| !keepers.contains(&host.gid);
                // It may have been asked just now, and the first question may be lost.
                let is_late = |host: &Host| is_free(host) && host.unanswered > 1;
                oldest(&|host| is_free(host) && !host.is_awaited()).or_else(|| oldest(&is_late))
            });
            let Some(at) = free else {
                return Place::None;
            };
            let host = self.all.swap_remove(at);
            left = host.answered.map(|_| host.gid);
        }
        self.swept.get_or_insert(now);
        self.all.push(Host {
            answered: (gid == self.own).then_some(now),
            ..Host::new(gid, now)
        });
        Place::Taken { left }
    }

    /// Keeps a request until its host has answered. One that is repeated takes the place of the first.
    pub(super) fn hold(&mut self, gid: Gid, mad: &Mad) {
        let Some(host) = self.find(gid) else {
            return;
        };
        let transaction = MadHeader::of(mad).transaction();
        let is_it = |other: &Mad| MadHeader::of(other).transaction() == transaction;
        match host.waiting.iter().position(is_it) {
            Some(same) => host.waiting[same] = *mad,
            None if host.waiting.len() < MAX_WAITING => host.waiting.push(*mad),
            None => {}
        }
    }

    /// Keeps a request of an earlier administrator until its host has answered. Returns whether it is the
    /// first one of its host, which is asked.
    pub(super) fn restore(&mut self, now: Instant, gid: Gid, mad: &Mad) -> bool {
        if self.find(gid).is_none() && self.all.len() < self.most {
            self.swept.get_or_insert(now);
            self.all.push(Host::new(gid, now));
        }
        let Some(host) = self.find(gid) else {
            return false;
        };
        if host.restored.len() < MAX_RESTORED {
            host.restored.push(*mad);
        }
        host.restored.len() == 1
    }

    /// Requests of an earlier administrator whose hosts have not answered yet.
    pub(super) fn restored(&self) -> impl Iterator<Item = (Gid, Mad)> {
        let hosts = self.all.iter();
        hosts.flat_map(|host| host.restored.iter().map(move |mad| (host.gid, *mad)))
    }

    fn challenge(&self, gid: Gid) -> TransactionId {
        let mut hasher = DefaultHasher::new();
        (self.secret, gid.0).hash(&mut hasher);
        TransactionId(hasher.finish())
    }

    /// A question to a host: ClassPortInfo of performance management, which Linux and our NIC answer,
    /// be it that they do not have the class.
    pub(super) fn question(&self, gid: Gid) -> Mad {
        let header = MadHeader::new(
            MadClass::Performance,
            perf::CLASS_VERSION,
            MadMethod::Get,
            self.challenge(gid),
            ClassPortInfo::ATTRIBUTE,
        );
        let mut mad = [0; MAD_LEN];
        mad[..size_of::<MadHeader>()].copy_from_slice(header.as_bytes());
        mad
    }

    /// Takes the answer to a question.
    pub(super) fn handle_answer(
        &mut self,
        now: Instant,
        from: Gid,
        transaction: TransactionId,
    ) -> Option<Answered> {
        if transaction != self.challenge(from) {
            return None;
        }
        let host = self.find(from)?;
        let is_new = host.answered.is_none();
        (host.heard, host.answered, host.unanswered) = (now, Some(now), 0);
        Some(Answered {
            is_new,
            restored: std::mem::take(&mut host.restored),
            waiting: std::mem::take(&mut host.waiting),
        })
    }

    /// Time of the next look at all hosts.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let swept = self.swept.filter(|_| !self.all.is_empty());
        swept.map(|swept| swept + SWEEP)
    }

    /// Looks at all hosts. Questions are counted and not the time: the administrator may have been
    /// stopped itself.
    pub(super) fn sweep(&mut self, now: Instant, keepers: &FxHashSet<Gid>) -> Silent {
        let mut silent = Silent::default();
        let own = self.own;
        self.swept = Some(now);
        self.all.retain_mut(|host| {
            let is_awaited = host.is_awaited();
            let is_kept = is_awaited || keepers.contains(&host.gid);
            let since = match host.answered {
                Some(answered) if is_kept => answered,
                _ => host.heard,
            };
            let is_silent = now.saturating_duration_since(since) >= FORGETTING;
            if host.gid == own && is_kept || !is_silent && !is_awaited {
                return true;
            }
            if is_kept && host.unanswered < MAX_UNANSWERED {
                host.unanswered += 1;
                silent.asked.push(host.gid);
                return true;
            }
            silent.gone.push((host.gid, host.answered.is_some()));
            false
        });
        silent
    }
}
