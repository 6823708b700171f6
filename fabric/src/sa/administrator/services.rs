//! Service records and their leases.

use std::time::{Duration, Instant};

use riser_transport::verbs::{Gid, PKey};
use riser_transport::wire::Mad;
use zerocopy::big_endian::{U16, U32};

use super::super::wire::service::{LEASE_FOREVER, ServiceMask, ServiceRecord};
use super::super::wire::{SaMethod, SaStatus};
use super::{Records, Refusal, request};

struct Service {
    record: ServiceRecord,
    /// Expiration time of the lease.
    until: Option<Instant>,
}

impl Service {
    /// Returns the record as reported to clients: without its key, and with the remaining lease.
    fn to_record(&self, now: Instant) -> ServiceRecord {
        let left = self.until.map(|until| until.saturating_duration_since(now));
        // Round up, so that a valid lease is never reported as 0.
        let seconds = left.map(|left| left.as_secs() + u64::from(left.subsec_nanos() != 0));
        let seconds = seconds.and_then(|s| u32::try_from(s).ok());
        ServiceRecord {
            lease: U32::new(seconds.unwrap_or(LEASE_FOREVER)),
            key: [0; 16],
            ..self.record
        }
    }

    /// Returns whether the identifier, GID and partition match a record.
    fn is(&self, record: &ServiceRecord) -> bool {
        let name = ServiceMask::SERVICE_ID | ServiceMask::GID | ServiceMask::PKEY;
        self.record.matches(name, record)
    }
}

/// Services of all hosts.
pub(super) struct Services {
    /// Maximum number of services: total, per host.
    limits: (usize, usize),
    all: Vec<Service>,
}

impl Services {
    pub(super) fn new(limits: (usize, usize)) -> Self {
        Self {
            limits,
            all: Vec::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns the hosts of all services. A host may occur several times.
    pub(super) fn hosts(&self) -> impl Iterator<Item = Gid> {
        self.all.iter().map(|service| service.record.gid())
    }

    /// Removes all services of a host.
    pub(super) fn remove(&mut self, gid: Gid) {
        self.all.retain(|service| service.record.gid() != gid);
    }

    /// Returns requests that recreate the services, with the remaining leases.
    pub(super) fn requests(&self, now: Instant) -> impl Iterator<Item = (Gid, Mad)> {
        self.all.iter().map(move |service| {
            let record = ServiceRecord {
                key: service.record.key,
                ..service.to_record(now)
            };
            (record.gid(), request(ServiceMask::ALL.bits(), &record))
        })
    }

    pub(super) fn handle(
        &mut self,
        now: Instant,
        from: Gid,
        method: SaMethod,
        mask: u64,
        wanted: &ServiceRecord,
    ) -> Result<Records, Refusal> {
        let mask = ServiceMask::from_bits_retain(mask);
        match method {
            SaMethod::Get | SaMethod::GetTable => {
                let found = self.all.iter().filter(|s| s.record.matches(mask, wanted));
                Ok(Records::of(found.map(|service| service.to_record(now))))
            }
            SaMethod::Set => self
                .set(now, &own(from, mask, wanted)?)
                .map(|r| Records::of([r])),
            SaMethod::Delete => {
                let wanted = own(from, mask, wanted)?;
                let at = self.all.iter().position(|service| service.is(&wanted));
                let at = at.ok_or(SaStatus::NoRecords)?;
                self.check_key(at, &wanted)?;
                Ok(Records::of([self.all.swap_remove(at).to_record(now)]))
            }
        }
    }

    fn set(&mut self, now: Instant, record: &ServiceRecord) -> Result<ServiceRecord, Refusal> {
        let seconds = record.lease.get();
        // Unlimited leases, and leases beyond the representable time, do not expire.
        let until = (seconds != LEASE_FOREVER)
            .then(|| now.checked_add(Duration::from_secs(seconds.into())))
            .flatten();
        let service = Service {
            record: *record,
            until,
        };
        let response = service.to_record(now);
        if let Some(at) = self.all.iter().position(|known| known.is(record)) {
            self.check_key(at, record)?;
            self.all[at] = service;
            return Ok(response);
        }
        let (all, each) = self.limits;
        let his = self.all.iter().filter(|s| s.record.gid == record.gid);
        if self.all.len() >= all || his.count() >= each {
            return Err(SaStatus::NoResources.into());
        }
        self.all.push(service);
        Ok(response)
    }

    /// Checks that a request has the key of the stored record, if that record has a key.
    fn check_key(&self, at: usize, record: &ServiceRecord) -> Result<(), Refusal> {
        let key = self.all[at].record.key;
        if key == [0; 16] || key == record.key {
            Ok(())
        } else {
            Err(SaStatus::Denied.into())
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.all.iter().filter_map(|service| service.until).min()
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.all
            .retain(|service| service.until.is_none_or(|until| until > now));
    }
}

/// Checks that a host only changes its own record, and fills in omitted fields.
fn own(from: Gid, mask: ServiceMask, given: &ServiceRecord) -> Result<ServiceRecord, Refusal> {
    if !mask.contains(ServiceMask::SERVICE_ID) {
        return Err(SaStatus::InsufficientComponents.into());
    }
    let mut record = *given;
    if !mask.contains(ServiceMask::GID) {
        record.gid = from.0;
    }
    if record.gid() != from {
        return Err(SaStatus::InvalidGid.into());
    }
    if !mask.contains(ServiceMask::PKEY) {
        record.pkey = U16::new(PKey::DEFAULT.0);
    }
    if record.pkey.get() & 0x7fff != PKey::DEFAULT.0 & 0x7fff {
        return Err(SaStatus::ReqInvalid.into());
    }
    if !mask.contains(ServiceMask::LEASE) {
        record.lease = U32::new(LEASE_FOREVER);
    }
    if !mask.contains(ServiceMask::KEY) {
        record.key = [0; 16];
    }
    Ok(record)
}
