//! Discovery of an address's SRP ports with device-management MADs (SRP r16a Annex B).
//!
//! [`Discovery`] queries the I/O unit, then the profile and services of each controller, one at a
//! time, and repeats queries without a response. Its owner sends the MADs of
//! [`Discovery::poll_query`] to queue pair 1 of the address, and passes received MADs to it.
//!
//! Bound: [`MAX_CONTROLLERS`] controllers with 255 services each, even if a peer reports more.

use std::time::{Duration, Instant};

use riser_transport::wire::dm::{
    Attribute, DmHeader, IoUnitInfo, IocProfile, MAD_LEN, Method, RDMA_CM_SERVICE,
    SERVICES_PER_MAD, ServiceEntry, Status,
};

/// Maximum number of controllers to query.
pub const MAX_CONTROLLERS: usize = 16;

/// Timeout of a query.
const PATIENCE: Duration = Duration::from_millis(400);

/// Maximum number of attempts per query.
const TRIES: u8 = 4;

/// An SRP target port of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPort {
    /// Second half of the port identifier.
    pub ioc_guid: u64,
    /// First half of the port identifier.
    pub id_ext: u64,
    /// Service ID of the listener.
    pub service_id: u64,
    /// Name of the controller, made printable.
    pub name: String,
}

impl FoundPort {
    /// Returns its RDMA/CM port, if it listens on one.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        (self.service_id & !0xffff == RDMA_CM_SERVICE).then_some(self.service_id as u16)
    }
}

/// Error of a discovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// The device does not support these queries.
    #[error("the device does not provide access to queue pair 1")]
    Unsupported,
    /// All queries timed out.
    #[error("no response from the address")]
    NoResponse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    IoUnit,
    Profile { slot: u8 },
    Services { slot: u8, first: u8 },
    Done,
}

/// A discovery of an address. See the documentation of the module.
#[derive(Debug)]
pub struct Discovery {
    step: Step,
    /// Slots to query, in reverse order.
    slots: Vec<u8>,
    profile: Option<IocProfile>,
    found: Vec<FoundPort>,
    transaction: u64,
    tries: u8,
    /// Time for repeating the query; `None` to send it immediately.
    until: Option<Instant>,
    failed: bool,
}

impl Discovery {
    /// Creates a discovery. `transaction` is the number of the first query, which should be
    /// unpredictable for other hosts.
    #[must_use]
    pub fn new(transaction: u64) -> Self {
        Self {
            step: Step::IoUnit,
            slots: Vec::new(),
            profile: None,
            found: Vec::new(),
            transaction,
            tries: 0,
            until: None,
            failed: false,
        }
    }

    fn attribute(&self) -> Option<Attribute> {
        Some(match self.step {
            Step::IoUnit => Attribute::IoUnitInfo,
            Step::Profile { slot } => Attribute::IocProfile { slot: slot.into() },
            Step::Services { slot, first } => {
                let count = self.profile.as_ref().map_or(0, |p| p.services);
                let last = first.saturating_add(SERVICES_PER_MAD as u8 - 1);
                Attribute::ServiceEntries {
                    slot: slot.into(),
                    first,
                    last: last.min(count.saturating_sub(1)),
                }
            }
            Step::Done => return None,
        })
    }

    /// Returns the MAD to send now, if any.
    pub fn poll_query(&mut self, now: Instant) -> Option<[u8; MAD_LEN]> {
        if self.until.is_some_and(|t| t > now) {
            return None;
        }
        let attribute = self.attribute()?;
        if self.tries == TRIES {
            // A silent controller is skipped; an address without any response is an error.
            self.failed |= self.step == Step::IoUnit;
            self.next_controller();
            return self.poll_query(now);
        }
        self.tries += 1;
        self.until = Some(now + PATIENCE);
        let header = DmHeader {
            method: Method::Get,
            status: Status::Success,
            transaction: self.transaction,
            attribute,
        };
        Some(header.emit(&[]))
    }

    /// Returns the time for the next [`Self::poll_query`], or `None` once there is a result.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.until.filter(|_| self.step != Step::Done)
    }

    /// Returns the result when all queries are complete.
    ///
    /// # Errors
    /// Within the option: [`DiscoveryError::NoResponse`].
    pub fn poll_result(&mut self) -> Option<Result<Vec<FoundPort>, DiscoveryError>> {
        if self.step != Step::Done {
            return None;
        }
        if self.failed {
            return Some(Err(DiscoveryError::NoResponse));
        }
        Some(Ok(std::mem::take(&mut self.found)))
    }

    /// Handles a MAD received from the address. Ignores MADs that do not match the current query.
    pub fn handle_mad(&mut self, mad: &[u8]) {
        let Ok((header, data)) = DmHeader::parse(mad) else {
            return;
        };
        let requested = self.attribute() == Some(header.attribute) && self.until.is_some();
        if header.method != Method::GetResp || header.transaction != self.transaction || !requested
        {
            return;
        }
        let ok = header.status == Status::Success;
        match self.step {
            Step::IoUnit => {
                if let Some(unit) = IoUnitInfo::parse(data).filter(|_| ok) {
                    let mut slots: Vec<u8> = unit.controllers().take(MAX_CONTROLLERS).collect();
                    slots.reverse();
                    self.slots = slots;
                }
                self.next_controller();
            }
            Step::Profile { slot } => match IocProfile::parse(data).filter(|_| ok) {
                Some(profile) if profile.services > 0 => {
                    self.profile = Some(profile);
                    self.send_query(Step::Services { slot, first: 0 });
                }
                _ => self.next_controller(),
            },
            Step::Services { slot, first } => self.handle_services(slot, first, data, ok),
            Step::Done => {}
        }
    }

    fn handle_services(&mut self, slot: u8, first: u8, data: &[u8], ok: bool) {
        let Some(profile) = self.profile.as_ref().filter(|_| ok) else {
            return self.next_controller();
        };
        let left = profile.services.saturating_sub(first);
        for service in ServiceEntry::parse_list(data, left.into()) {
            if let Some(id_ext) = service.srp_extension() {
                self.found.push(FoundPort {
                    ioc_guid: profile.guid,
                    id_ext,
                    service_id: service.service_id,
                    name: profile.name.clone(),
                });
            }
        }
        match first.checked_add(SERVICES_PER_MAD as u8) {
            Some(next) if next < profile.services => {
                self.send_query(Step::Services { slot, first: next });
            }
            _ => self.next_controller(),
        }
    }

    fn next_controller(&mut self) {
        self.profile = None;
        match self.slots.pop() {
            Some(slot) => self.send_query(Step::Profile { slot }),
            None => self.send_query(Step::Done),
        }
    }

    fn send_query(&mut self, step: Step) {
        self.step = step;
        self.transaction = self.transaction.wrapping_add(1);
        self.tries = 0;
        self.until = None;
    }
}

/// Selects the port for an address without identifiers: the only port that listens on the RDMA/CM
/// port, or otherwise the only port of all. Returns `None` if there is no such port, or several.
#[must_use]
pub fn plan_port(found: &[FoundPort], port: u16) -> Option<&FoundPort> {
    let same = |a: &FoundPort, b: &FoundPort| (a.ioc_guid, a.id_ext) == (b.ioc_guid, b.id_ext);
    let here = found.iter().find(|f| f.port() == Some(port));
    let first = here.or(found.first())?;
    let rivals = |f: &&FoundPort| here.is_none() || f.port() == Some(port);
    found
        .iter()
        .filter(rivals)
        .all(|f| same(f, first))
        .then_some(first)
}

/// Selects the ports to log in to: each found port once. A port reachable by the RDMA connection
/// manager may also have other service IDs, which such a target provides for hosts on InfiniBand.
#[must_use]
pub fn plan_logins(found: Vec<FoundPort>) -> Vec<FoundPort> {
    let name = |f: &FoundPort| (f.ioc_guid, f.id_ext);
    let mut kept: Vec<FoundPort> = Vec::new();
    for port in &found {
        let is_same = |other: &FoundPort| name(other) == name(port);
        let is_known = kept.iter().any(|k| is_same(k) && k.port() == port.port());
        let has_better = port.port().is_none()
            && found
                .iter()
                .any(|other| is_same(other) && other.port().is_some());
        if !is_known && !has_better {
            kept.push(port.clone());
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Responds like a target with these controllers (GUID, services).
    fn build_response(question: &[u8], units: &[(u64, Vec<ServiceEntry>)]) -> [u8; MAD_LEN] {
        let (header, _) = DmHeader::parse(question).unwrap();
        assert_eq!(header.method, Method::Get);
        let data = match header.attribute {
            Attribute::IoUnitInfo => IoUnitInfo::new(1, 16, units.len() as u8).emit().to_vec(),
            Attribute::IocProfile { slot } => {
                let (guid, services) = &units[slot as usize - 1];
                IocProfile {
                    guid: *guid,
                    send_queue_depth: 64,
                    read_depth: 16,
                    send_size: 8260,
                    rdma_size: u32::MAX,
                    services: services.len() as u8,
                    name: "disk".to_owned(),
                }
                .emit()
                .to_vec()
            }
            Attribute::ServiceEntries { slot, first, last } => {
                let services = &units[usize::from(slot) - 1].1;
                assert!(
                    usize::from(last) < services.len(),
                    "requests all available data"
                );
                ServiceEntry::emit_list(&services[first.into()..=last.into()]).to_vec()
            }
            other => panic!("{other:?}"),
        };
        DmHeader {
            method: Method::GetResp,
            ..header
        }
        .emit(&data)
    }

    #[test]
    fn discovery_finds_all_controller_services() {
        let service = |i: u64| ServiceEntry::srp_at_port(i, 5000 + i as u16);
        let units = [
            (7, (0..6).map(service).collect::<Vec<_>>()),
            (8, Vec::new()),
            (9, vec![service(20)]),
        ];
        let now = Instant::now();
        let mut discovery = Discovery::new(100);
        let mut questions = 0;
        while let Some(question) = discovery.poll_query(now) {
            questions += 1;
            assert_eq!(discovery.poll_query(now), None, "one at a time");
            discovery.handle_mad(&build_response(&question, &units));
        }
        assert_eq!(questions, 1 + 3 + 2 + 1);
        let found = discovery.poll_result().unwrap().unwrap();
        let ids: Vec<_> = found.iter().map(|f| (f.ioc_guid, f.id_ext)).collect();
        assert_eq!(
            ids,
            [(7, 0), (7, 1), (7, 2), (7, 3), (7, 4), (7, 5), (9, 20)]
        );
        assert_eq!(found[6].port(), Some(5020));
        assert_eq!(plan_port(&found, 5003).unwrap().id_ext, 3);
        assert_eq!(plan_port(&found, 1), None);
        assert_eq!(plan_port(&found[6..], 1).unwrap().id_ext, 20);
    }

    #[test]
    fn unanswered_queries_are_repeated_then_fail() {
        let mut now = Instant::now();
        let mut discovery = Discovery::new(1);
        for _ in 0..TRIES {
            assert!(discovery.poll_query(now).is_some());
            assert!(discovery.poll_result().is_none());
            now = discovery.deadline().unwrap();
        }
        assert_eq!(discovery.poll_query(now), None);
        assert_eq!(
            discovery.poll_result(),
            Some(Err(DiscoveryError::NoResponse))
        );
        assert_eq!(discovery.deadline(), None);
    }

    #[test]
    fn foreign_and_late_responses_are_ignored() {
        let now = Instant::now();
        let mut discovery = Discovery::new(50);
        let question = discovery.poll_query(now).unwrap();
        let good = build_response(&question, &[]);
        let mut other = good;
        other[15] ^= 1;
        discovery.handle_mad(&other);
        discovery.handle_mad(&question);
        discovery.handle_mad(&good[..200]);
        assert!(discovery.poll_result().is_none());
        discovery.handle_mad(&good);
        assert_eq!(discovery.poll_result(), Some(Ok(Vec::new())));
        discovery.handle_mad(&good);
    }

    proptest! {
        #[test]
        fn arbitrary_responses_never_panic_or_loop(seed: Vec<u8>, status in 0u16..3) {
            let now = Instant::now();
            let mut discovery = Discovery::new(9);
            let mut questions = 0;
            while let Some(mut mad) = discovery.poll_query(now) {
                mad[3] = 0x81;
                mad[4..6].copy_from_slice(&(status / 2).to_be_bytes());
                for (at, byte) in mad[64..].iter_mut().enumerate() {
                    *byte = seed.get(at % (seed.len() + 1)).copied().unwrap_or(0x11);
                }
                // A profile must indicate SRP for its services to be queried.
                mad[64 + 28..64 + 30].copy_from_slice(&[1, 0]);
                discovery.handle_mad(&mad);
                questions += 1;
                prop_assert!(questions <= 1 + MAX_CONTROLLERS * 65);
            }
            prop_assert!(discovery.poll_result().is_some());
        }
    }
}
