//! Known hosts and their reachability.
//!
//! ```text
//!          request                    response to a probe
//! (none) ─────────────▶ heard ──────────────────────────────────▶ present
//!    ▲                    │ silent for FORGETTING, or its slot       │ stores nothing and silent for
//!    │                    │ is needed                                │ FORGETTING, or did not respond to
//!    └────────────────────┴──────────────────────────────────────────┘ MAX_UNANSWERED probes
//! ```
//!
//! The source of a datagram can be forged, so each new host is probed with a number that only its
//! address receives. Requests that change state are deferred until the host has responded, and each
//! of them triggers at most one datagram. Silent hosts with stored state are probed periodically,
//! because a host that was switched off must not occupy memory forever. Hosts with state restored
//! after a restart of the administrator are probed as well.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant};

use riser_transport::verbs::Gid;
use riser_transport::wire::mad::{ClassPortInfo, MadClass, MadHeader, MadMethod};
use riser_transport::wire::{MAD_LEN, Mad, TransactionId, perf};
use rustc_hash::FxHashSet;
use zerocopy::IntoBytes as _;

use super::super::wire::Record as _;

/// Idle time after which a host without stored state is forgotten, and a host with stored state is
/// probed.
pub(super) const FORGETTING: Duration = Duration::from_secs(600);

/// Interval between sweeps over all hosts.
pub(super) const SWEEP: Duration = Duration::from_secs(60);

/// Maximum number of consecutive unanswered probes, one per [`SWEEP`]: about an hour.
const MAX_UNANSWERED: u32 = 50;

/// Maximum number of deferred requests per host. The host retransmits any further requests.
const MAX_WAITING: usize = 8;

/// Maximum number of restored requests per host, which exceeds the limit of stored records.
const MAX_RESTORED: usize = 128;

/// Unicast LIDs (IBTA 4.1.3).
const LIDS: std::ops::Range<u16> = 1..0xc000;

struct Host {
    gid: Gid,
    /// LID of its port; 0 until it has responded to a probe.
    lid: u16,
    /// Time of the last datagram from this address.
    last_seen: Instant,
    /// Time of the last probe response, if any.
    responded: Option<Instant>,
    /// Number of probes since the last response.
    unanswered: u32,
    /// Requests deferred until the first probe response.
    waiting: Vec<Mad>,
    /// Requests received by a previous administrator. The host does not know about the restart and
    /// will not repeat them.
    restored: Vec<Mad>,
}

impl Host {
    fn new(gid: Gid, now: Instant) -> Self {
        Self {
            gid,
            lid: 0,
            last_seen: now,
            responded: None,
            unanswered: 0,
            waiting: Vec::new(),
            restored: Vec::new(),
        }
    }

    /// Returns whether the host had state before a restart and has not responded since.
    fn is_awaited(&self) -> bool {
        !self.restored.is_empty()
    }
}

/// Returns the low bits of a GID, or the first LID if they are not a unicast LID.
fn wished_lid(gid: Gid) -> u16 {
    let low = u16::from_be_bytes([gid.0[14], gid.0[15]]);
    if LIDS.contains(&low) { low } else { LIDS.start }
}

/// Requests to execute after a probe response.
pub(super) struct ProbeResponse {
    /// The host was not present before.
    pub(super) is_new: bool,
    /// Requests received by a previous administrator.
    pub(super) restored: Vec<Mad>,
    /// Deferred requests.
    pub(super) waiting: Vec<Mad>,
}

/// Slot in the host table.
pub(super) enum HostSlot {
    /// The host has a slot. `left` is a present host that was evicted for it.
    Taken { left: Option<Gid> },
    /// All slots belong to hosts with stored state.
    None,
}

/// Actions for unresponsive hosts.
#[derive(Default)]
pub(super) struct Silent {
    /// Removed hosts, and whether each was present.
    pub(super) gone: Vec<(Gid, bool)>,
    /// Hosts to probe.
    pub(super) to_query: Vec<Gid>,
}

/// Hosts of the fabric.
pub(super) struct Hosts {
    most: usize,
    /// GID of the administrator, which is always present.
    own: Gid,
    secret: [u8; 16],
    all: Vec<Host>,
    /// Time of the last sweep, or of the first host.
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

    /// Returns whether a host is present.
    pub(super) fn is_present(&self, gid: Gid) -> bool {
        let is_it = |host: &Host| host.gid == gid && host.responded.is_some();
        self.all.iter().any(is_it)
    }

    /// Returns the LID of a port, or 0 if its host is not present.
    pub(super) fn lid(&self, gid: Gid) -> u16 {
        if gid == self.own {
            return wished_lid(gid);
        }
        let host = self.all.iter().find(|host| host.gid == gid);
        host.map_or(0, |host| host.lid)
    }

    /// Returns the port with a LID.
    pub(super) fn with_lid(&self, lid: u16) -> Option<Gid> {
        if lid == self.lid(self.own) {
            return Some(self.own);
        }
        let host = self.all.iter().find(|host| host.lid == lid)?;
        (lid != 0).then_some(host.gid)
    }

    /// Returns an unused LID for a port: preferably the low bits of its GID, so that it does not
    /// depend on the order of the hosts. There are always fewer hosts than LIDs.
    fn free_lid(&self, gid: Gid) -> u16 {
        let mut all = std::iter::once(wished_lid(gid)).chain(LIDS);
        all.find(|lid| self.with_lid(*lid).is_none())
            .unwrap_or_default()
    }

    /// Returns all present hosts.
    pub(super) fn present(&self) -> impl Iterator<Item = Gid> {
        let present = self.all.iter().filter(|host| host.responded.is_some());
        present.map(|host| host.gid)
    }

    /// Records that a datagram arrived from a host. If the table is full, the slot of a host in
    /// state *heard* is reused first, then the slot of a host without stored state (not in
    /// `keepers`), and finally the slot of a host that did not respond in time after a restart.
    pub(super) fn note(
        &mut self,
        now: Instant,
        gid: Gid,
        keepers: impl FnOnce() -> FxHashSet<Gid>,
    ) -> HostSlot {
        if let Some(host) = self.find(gid) {
            host.last_seen = now;
            return HostSlot::Taken { left: None };
        }
        let mut left = None;
        if self.all.len() >= self.most {
            let oldest = |may: &dyn Fn(&Host) -> bool| {
                let free = self.all.iter().enumerate().filter(|(_, host)| may(host));
                let free = free.min_by_key(|(_, host)| host.last_seen);
                free.map(|(at, _)| at)
            };
            let is_unconfirmed = |host: &Host| host.responded.is_none() && !host.is_awaited();
            let free = oldest(&is_unconfirmed).or_else(|| {
                let keepers = keepers();
                let is_free = |host: &Host| !keepers.contains(&host.gid);
                // The first probe may have been lost, or the second may still be in flight.
                let is_late = |host: &Host| is_free(host) && host.unanswered > 1;
                oldest(&|host| is_free(host) && !host.is_awaited()).or_else(|| oldest(&is_late))
            });
            let Some(at) = free else {
                return HostSlot::None;
            };
            let host = self.all.swap_remove(at);
            left = host.responded.map(|_| host.gid);
        }
        self.swept.get_or_insert(now);
        self.all.push(Host {
            lid: if gid == self.own { self.lid(gid) } else { 0 },
            responded: (gid == self.own).then_some(now),
            ..Host::new(gid, now)
        });
        HostSlot::Taken { left }
    }

    /// Defers a request until its host has responded. A retransmission replaces the original.
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

    /// Defers a request received by a previous administrator until its host has responded. Returns
    /// whether it is the first deferred request of the host, which must then be probed.
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

    /// Returns requests of a previous administrator whose hosts have not responded yet.
    pub(super) fn restored(&self) -> impl Iterator<Item = (Gid, Mad)> {
        let hosts = self.all.iter();
        hosts.flat_map(|host| host.restored.iter().map(move |mad| (host.gid, *mad)))
    }

    fn challenge(&self, gid: Gid) -> TransactionId {
        let mut hasher = DefaultHasher::new();
        (self.secret, gid.0).hash(&mut hasher);
        TransactionId(hasher.finish())
    }

    /// Builds the probe of a host: a ClassPortInfo query of performance management. Linux and our
    /// NIC respond to it even if they do not support the class.
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

    /// Handles the response to a probe.
    pub(super) fn handle_response(
        &mut self,
        now: Instant,
        from: Gid,
        transaction: TransactionId,
    ) -> Option<ProbeResponse> {
        if transaction != self.challenge(from) {
            return None;
        }
        let index = self.all.iter().position(|host| host.gid == from)?;
        let is_new = self.all[index].responded.is_none();
        if is_new {
            self.all[index].lid = self.free_lid(from);
        }
        let host = &mut self.all[index];
        (host.last_seen, host.responded, host.unanswered) = (now, Some(now), 0);
        Some(ProbeResponse {
            is_new,
            restored: std::mem::take(&mut host.restored),
            waiting: std::mem::take(&mut host.waiting),
        })
    }

    /// Returns the time of the next sweep.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let swept = self.swept.filter(|_| !self.all.is_empty());
        swept.map(|swept| swept + SWEEP)
    }

    /// Sweeps all hosts. Probes are counted instead of elapsed time, because the administrator
    /// itself may have been stopped.
    pub(super) fn sweep(&mut self, now: Instant, keepers: &FxHashSet<Gid>) -> Silent {
        let mut silent = Silent::default();
        let own = self.own;
        self.swept = Some(now);
        self.all.retain_mut(|host| {
            let is_awaited = host.is_awaited();
            let is_kept = is_awaited || keepers.contains(&host.gid);
            let since = match host.responded {
                Some(responded) if is_kept => responded,
                _ => host.last_seen,
            };
            let is_silent = now.saturating_duration_since(since) >= FORGETTING;
            if host.gid == own && is_kept || !is_silent && !is_awaited {
                return true;
            }
            if is_kept && host.unanswered < MAX_UNANSWERED {
                host.unanswered += 1;
                silent.to_query.push(host.gid);
                return true;
            }
            silent.gone.push((host.gid, host.responded.is_some()));
            false
        });
        silent
    }
}
