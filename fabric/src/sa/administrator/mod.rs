//! Subnet administrator for RoCE fabrics, which have no subnet manager.
//!
//! On RoCE an address is a GID, so every path can be computed. The administrator stores only the
//! state that hosts register: services with their leases ([`services`]), multicast groups with
//! their members ([`groups`]), subscriptions to notices ([`notices`]), and the capabilities of their
//! ports ([`ports`]). A host may only register its own GID, from queue pair 1 to queue pair 1.
//!
//! RoCE does not use LIDs, but programs written for InfiniBand select nodes, ports and paths by
//! LID. The administrator therefore assigns a LID to each present host: the low 16 bits of its GID
//! if they are an unused unicast LID, or the first unused one. Paths selected by GIDs contain none.
//!
//! The source of a datagram can be forged. State is therefore stored only after the host has
//! responded to a probe ([`hosts`]), and only while it keeps responding. An attacker that forges
//! the address of a present host can still act on its behalf: the administrator is a directory
//! without authentication. [`Limits`] apply per host and in total; excess requests fail with
//! ERR_NO_RESOURCES.

mod groups;
mod hosts;
mod notices;
mod paths;
mod ports;
mod services;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use riser_transport::verbs::{Gid, Mtu};
use riser_transport::wire::mad::{ClassPortInfo, MadClass, MadMethod, MadStatus, RESPONSE};
use riser_transport::wire::{Mad, TransactionId};
use rustc_hash::FxHashSet;
use zerocopy::big_endian::U16;

use super::rmpp::{MAX_LEN, Progress, Sender};
use super::wire::inform::{InformInfo, InformInfoRecord, InformMask, Trap};
use super::wire::mcmember::McMemberRecord;
use super::wire::node::{NodeMask, NodeRecord, PortInfoMask, PortInfoRecord};
use super::wire::path::{PathMask, PathRecord};
use super::wire::service::ServiceRecord;
use super::wire::{CLASS_VERSION, DATA_LEN, Record, SaHeader, SaMethod, SaStatus, rmpp_type};
use groups::Groups;
use hosts::{HostSlot, Hosts};
use notices::Notices;
use ports::Ports;
use services::Services;

/// Maximum number of queued responses. Further requests are dropped like lost datagrams.
const MAX_RESPONSES: usize = 256;

/// Time after which a multi-packet response may be evicted by a new one if the table is full.
const PATIENCE: Duration = Duration::from_secs(5);

/// CapabilityMask of the class: IsUDMulticastSupported and IsPortInfoCapMaskMatchSupported (IBTA
/// table 158).
const CAPABILITIES: u16 = 1 << 9 | 1 << 13;

/// Response time: 4.096 µs × 2^18, about a second.
const RESPONSE_TIME: u8 = 18;

/// Static rate of 2.5 Gbit/s, the lowest encodable value, because a socket has no rate.
const RATE: u8 = 2;

/// Packet life time: 4.096 µs × 2^18, about a second.
const LIFE_TIME: u8 = 18;

/// Hop limit of paths. A value above 1 also indicates that packets have a GRH, as all RoCE packets
/// do.
const HOP_LIMIT: u8 = 64;

/// Limits on stored state.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Known hosts.
    pub hosts: usize,
    /// Service records: total, per host.
    pub services: (usize, usize),
    /// Multicast groups.
    pub groups: usize,
    /// Group memberships: total, per host.
    pub members: (usize, usize),
    /// Subscriptions to notices: total, per host.
    pub subscriptions: (usize, usize),
    /// Multi-packet responses in flight: total, per host.
    pub transfers: (usize, usize),
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            hosts: 256,
            // A response can hold all of them.
            services: (320, 32),
            groups: 256,
            members: (2048, 64),
            subscriptions: (256, 16),
            transfers: (64, 4),
        }
    }
}

/// Configuration of an administrator.
#[derive(Clone, Copy, Debug)]
pub struct AdministratorConfig {
    /// GID of the administrator.
    pub gid: Gid,
    /// Path MTU to report.
    pub mtu: Mtu,
    /// Limits on stored state.
    pub limits: Limits,
    /// Random bytes unknown to all hosts. Probe identifiers are derived from them.
    pub secret: [u8; 16],
}

impl AdministratorConfig {
    /// Creates a configuration for an administrator at this address.
    #[must_use]
    pub fn new(addr: IpAddr, mtu: Mtu, secret: [u8; 16]) -> Self {
        Self {
            gid: addr.into(),
            mtu,
            limits: Limits::default(),
            secret,
        }
    }
}

/// Rejection of a request, with the status of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Refusal(u16);

impl From<MadStatus> for Refusal {
    fn from(status: MadStatus) -> Self {
        Self(status as u16)
    }
}

impl From<SaStatus> for Refusal {
    fn from(status: SaStatus) -> Self {
        Self(status as u16)
    }
}

/// Records of a response.
struct Records {
    words: u16,
    count: usize,
    data: Vec<u8>,
}

impl Records {
    fn of<R: Record>(records: impl IntoIterator<Item = R>) -> Self {
        let (mut data, mut count) = (Vec::new(), 0);
        for record in records {
            // One record beyond the maximum marks the response as too long.
            if data.len() > MAX_LEN {
                break;
            }
            record.append(&mut data);
            count += 1;
        }
        Self {
            words: R::WORDS,
            count,
            data,
        }
    }
}

/// Amount of stored state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Known hosts.
    pub hosts: usize,
    /// Service records.
    pub services: usize,
    /// Multicast groups.
    pub groups: usize,
    /// Group memberships.
    pub members: usize,
    /// Subscriptions to notices.
    pub subscriptions: usize,
    /// Ports with registered capabilities.
    pub ports: usize,
    /// Multi-packet responses in flight.
    pub transfers: usize,
}

/// Subnet administrator.
pub struct Administrator {
    config: AdministratorConfig,
    hosts: Hosts,
    services: Services,
    groups: Groups,
    notices: Notices,
    ports: Ports,
    responses: VecDeque<(Gid, Mad)>,
    transfers: Vec<(Gid, Sender)>,
    changes: u64,
}

impl std::fmt::Debug for Administrator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Administrator")
            .field("gid", &self.config.gid)
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}

impl Administrator {
    /// Creates an administrator without known hosts.
    #[must_use]
    pub fn new(config: AdministratorConfig) -> Self {
        let limits = config.limits;
        Self {
            hosts: Hosts::new(limits.hosts, config.gid, config.secret),
            services: Services::new(limits.services),
            groups: Groups::new(limits.groups, limits.members),
            notices: Notices::new(config.gid, limits.subscriptions, config.secret),
            ports: Ports::default(),
            responses: VecDeque::new(),
            transfers: Vec::new(),
            changes: 0,
            config,
        }
    }

    /// Returns the amount of stored state.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            hosts: self.hosts.len(),
            services: self.services.len(),
            groups: self.groups.len(),
            members: self.groups.members(),
            subscriptions: self.notices.len(),
            ports: self.ports.len(),
            transfers: self.transfers.len(),
        }
    }

    /// Changes the path MTU of all subsequent responses.
    pub fn set_mtu(&mut self, mtu: Mtu) {
        self.config.mtu = mtu;
    }

    /// Computes the path from one GID to another.
    #[must_use]
    pub fn path(&self, sgid: Gid, dgid: Gid) -> Option<PathRecord> {
        paths::compute(self.config.mtu, &self.groups, sgid, dgid)
    }

    /// Returns the first path that matches the selected fields of a query.
    #[must_use]
    pub fn find_path(&self, mask: PathMask, wanted: &PathRecord) -> Option<PathRecord> {
        let path = self.path(wanted.sgid(), wanted.dgid())?;
        paths::fit(path, mask, wanted)
    }

    /// Handles a MAD received from queue pair 1 of a host.
    pub fn handle_mad(&mut self, now: Instant, from: Gid, mad: &[u8]) {
        let Ok((header, data)) = SaHeader::parse(mad) else {
            return;
        };
        if header.mad.class() == MadClass::Performance as u8 {
            self.handle_presence(now, from, &header);
            return;
        }
        if header.mad.class() != MadClass::SubnetAdm as u8 {
            return;
        }
        if header.rmpp.is_active() && header.rmpp.rmpp_type != rmpp_type::DATA {
            self.handle_transfer(now, from, &header);
        } else if header.mad.method() == MadMethod::ReportResp as u8 {
            self.notices
                .handle_response(now, from, header.mad.transaction());
        } else if header.mad.method() & RESPONSE == 0 && expects_response(header.mad.method()) {
            self.handle_request(now, from, &header, data);
        }
    }

    /// Handles a host's probe response, then the requests deferred until it.
    fn handle_presence(&mut self, now: Instant, from: Gid, header: &SaHeader) {
        if header.mad.method() & RESPONSE == 0 {
            return;
        }
        let transaction = header.mad.transaction();
        let Some(response) = self.hosts.handle_response(now, from, transaction) else {
            return;
        };
        if response.is_new {
            self.notices.raise(now, Trap::GidInService, from);
        }
        for mad in response.restored {
            self.register(now, from, &mad);
        }
        for mad in response.waiting {
            self.handle_mad(now, from, &mad);
        }
    }

    /// Returns requests that recreate the stored state, each with its host. After a restart a new
    /// administrator passes them to [`Self::restore`], because hosts do not notice a restart and do
    /// not repeat their requests.
    #[must_use]
    pub fn requests(&self, now: Instant) -> Vec<(Gid, Mad)> {
        let services = self.services.requests(now);
        let (groups, notices) = (self.groups.requests(), self.notices.requests());
        let kept = services.chain(groups).chain(notices);
        let kept = kept.chain(self.ports.requests());
        // Restored requests of hosts that have not responded yet must survive this administrator
        // too.
        kept.chain(self.hosts.restored()).collect()
    }

    /// Returns the number of changes to the stored state, except for changes due to timeouts.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Restores a request received by a previous administrator. It is executed without a response
    /// once its host has responded to a probe. A send-only member is skipped if no full member of
    /// its group has been restored before, because the group does not exist then.
    pub fn restore(&mut self, now: Instant, host: Gid, mad: &Mad) {
        if host == self.config.gid {
            self.note(now, host);
            self.register(now, host, mad);
        } else if self.hosts.restore(now, host, mad) && self.responses.len() < MAX_RESPONSES {
            self.responses.push_back((host, self.hosts.question(host)));
        }
    }

    /// Executes a request that a previous administrator already responded to.
    fn register(&mut self, now: Instant, host: Gid, mad: &Mad) {
        if let Ok((header, data)) = SaHeader::parse(mad)
            && SaMethod::of(header.mad.method()) == Some(SaMethod::Set)
        {
            let result = self.execute_request(now, host, SaMethod::Set, &header, data);
            self.changes += u64::from(result.is_ok());
            if let Err(Refusal(status)) = result {
                let attribute = header.mad.attribute();
                tracing::info!(%host, attribute, status, "rejected a record that a host registered before a restart");
            }
        }
    }

    fn handle_transfer(&mut self, now: Instant, from: Gid, header: &SaHeader) {
        let is_it = |(to, sender): &(Gid, Sender)| {
            *to == from && sender.header().mad.transaction() == header.mad.transaction()
        };
        if let Some(at) = self.transfers.iter().position(is_it)
            && self.transfers[at].1.handle(&header.rmpp, now) != Progress::Going
        {
            self.transfers.remove(at);
        }
    }

    fn handle_request(
        &mut self,
        now: Instant,
        from: Gid,
        header: &SaHeader,
        data: &[u8; DATA_LEN],
    ) {
        if self.responses.len() >= MAX_RESPONSES {
            return;
        }
        let is_known = self.note(now, from);
        let is_present = self.hosts.is_present(from);
        let method = SaMethod::of(header.mad.method());
        let is_change = matches!(method, Some(SaMethod::Set | SaMethod::Delete));
        if is_known && !is_present && is_change {
            self.responses.push_back((from, self.hosts.question(from)));
            self.hosts.hold(from, &header.emit(data));
            return;
        }
        let result = match method {
            _ if header.mad.class_version() != CLASS_VERSION => Err(MadStatus::BadVersion.into()),
            None => Err(MadStatus::UnsupportedMethod.into()),
            Some(SaMethod::Set) if !is_known => Err(SaStatus::NoResources.into()),
            Some(method) => self.execute_request(now, from, method, header, data),
        };
        self.changes += u64::from(is_change && result.is_ok());
        let is_table = method == Some(SaMethod::GetTable);
        let result = result.and_then(|records| match records.count {
            _ if records.data.len() > MAX_LEN => Err(SaStatus::NoResources.into()),
            _ if is_table => Ok(records),
            0 => Err(SaStatus::NoRecords.into()),
            1 => Ok(records),
            _ => Err(SaStatus::TooManyRecords.into()),
        });
        let response = |status: u16, words: u16| SaHeader {
            mad: header.mad.response(MadStatus::Success).with_status(status),
            attribute_offset: U16::new(words),
            rmpp: super::wire::RmppHeader::default(),
            ..*header
        };
        let refused = match result {
            Ok(records) if is_table => {
                let response = response(0, records.words);
                self.begin_transfer(now, from, response, records.data).err()
            }
            Ok(records) => {
                let mad = response(0, records.words).emit(&records.data);
                self.responses.push_back((from, mad));
                None
            }
            Err(refusal) => Some(refusal),
        };
        if let Some(Refusal(status)) = refused {
            self.responses
                .push_back((from, response(status, 0).emit(data)));
        }
        if is_known && !is_present {
            self.responses.push_back((from, self.hosts.question(from)));
        }
    }

    fn begin_transfer(
        &mut self,
        now: Instant,
        to: Gid,
        header: SaHeader,
        data: Vec<u8>,
    ) -> Result<(), Refusal> {
        let (all, each) = self.config.limits.transfers;
        let transaction = header.mad.transaction();
        let is_his = |(other, _): &&(Gid, Sender)| *other == to;
        // The host retransmits its query and has discarded the partial response.
        let is_it = |(other, sender): &(Gid, Sender)| {
            *other == to && sender.header().mad.transaction() == transaction
        };
        self.transfers.retain(|transfer| !is_it(transfer));
        // Without an acknowledgment the requester's address may be forged.
        let is_idle = |sender: &Sender| sender.is_unanswered() || sender.begun() + PATIENCE <= now;
        let is_full_of_his = self.transfers.iter().filter(is_his).count() >= each;
        if is_full_of_his || self.transfers.len() >= all {
            let may_go = |transfer: &(Gid, Sender)| {
                is_idle(&transfer.1) && (!is_full_of_his || is_his(&transfer))
            };
            let free = self.transfers.iter().position(may_go);
            self.transfers.remove(free.ok_or(SaStatus::NoResources)?);
        }
        self.transfers.push((to, Sender::new(header, data, now)));
        Ok(())
    }

    /// Records that a host was heard; returns whether it has a slot.
    fn note(&mut self, now: Instant, gid: Gid) -> bool {
        let (services, groups) = (&self.services, &self.groups);
        let (notices, ports) = (&self.notices, &self.ports);
        let keepers = || keepers(services, groups, notices, ports);
        match self.hosts.note(now, gid, keepers) {
            HostSlot::Taken { left } => {
                if let Some(left) = left {
                    self.notices.raise(now, Trap::GidOutOfService, left);
                }
                true
            }
            HostSlot::None => false,
        }
    }

    /// Removes all state of a host.
    fn remove(&mut self, now: Instant, gid: Gid) {
        self.changes += 1;
        self.services.remove(gid);
        self.notices.remove(gid);
        self.ports.remove(gid);
        for mgid in self.groups.remove(gid) {
            self.notices.raise(now, Trap::GroupDeleted, mgid);
        }
    }

    fn sweep(&mut self, now: Instant) {
        let keepers = keepers(&self.services, &self.groups, &self.notices, &self.ports);
        let silent = self.hosts.sweep(now, &keepers);
        for (gid, was_present) in silent.gone {
            self.remove(now, gid);
            if was_present {
                self.notices.raise(now, Trap::GidOutOfService, gid);
            }
        }
        // Not subject to the limit on responses: there are few hosts, and a skipped host would be
        // treated as silent.
        for gid in silent.to_query {
            self.responses.push_back((gid, self.hosts.question(gid)));
        }
    }

    fn execute_request(
        &mut self,
        now: Instant,
        from: Gid,
        method: SaMethod,
        header: &SaHeader,
        data: &[u8],
    ) -> Result<Records, Refusal> {
        let mask = header.component_mask.get();
        match (header.mad.attribute(), method) {
            (PathRecord::ATTRIBUTE, SaMethod::Get | SaMethod::GetTable) => {
                self.find_paths(from, method, PathMask::from_bits_retain(mask), &read(data)?)
            }
            (ServiceRecord::ATTRIBUTE, _) => {
                self.services.handle(now, from, method, mask, &read(data)?)
            }
            (McMemberRecord::ATTRIBUTE, _) => {
                let groups = &mut self.groups;
                let mtu = self.config.mtu;
                let (records, event) = groups.handle(from, method, mask, &read(data)?, mtu)?;
                if let Some((trap, mgid)) = event {
                    self.notices.raise(now, trap, mgid);
                }
                Ok(records)
            }
            (InformInfo::ATTRIBUTE, SaMethod::Set) => self.notices.handle(from, &read(data)?),
            (InformInfoRecord::ATTRIBUTE, SaMethod::Get | SaMethod::GetTable) => {
                let mask = InformMask::from_bits_retain(mask);
                Ok(self.notices.find(mask, &read(data)?))
            }
            (NodeRecord::ATTRIBUTE, SaMethod::Get | SaMethod::GetTable) => {
                let (mask, wanted) = (NodeMask::from_bits_retain(mask), read(data)?);
                let all = self
                    .gids(from)
                    .map(|gid| ports::node_record(gid, self.hosts.lid(gid)));
                Ok(Records::of(all.filter(|node| node.matches(mask, &wanted))))
            }
            (PortInfoRecord::ATTRIBUTE, SaMethod::Get | SaMethod::GetTable) => {
                let (mask, wanted) = (PortInfoMask::from_bits_retain(mask), read(data)?);
                let modifier = header.mad.modifier();
                let all = self.gids(from).map(|gid| self.port_info_record(gid));
                let all = all.filter(|port| port.matches(mask, &wanted, modifier));
                Ok(Records::of(all))
            }
            (PortInfoRecord::ATTRIBUTE, SaMethod::Set) => {
                let mask = PortInfoMask::from_bits_retain(mask);
                self.ports.register(now, from, mask, &read(data)?)?;
                Ok(Records::of([self.port_info_record(from)]))
            }
            (ClassPortInfo::ATTRIBUTE, SaMethod::Get) => Ok(Records::of([ClassPortInfo::new(
                CLASS_VERSION,
                CAPABILITIES,
                RESPONSE_TIME,
            )])),
            _ => Err(MadStatus::UnsupportedAttribute.into()),
        }
    }

    fn port_info_record(&self, gid: Gid) -> PortInfoRecord {
        let lids = [gid, self.config.gid].map(|gid| self.hosts.lid(gid));
        ports::port_info_record(gid, lids, self.config.mtu, self.ports.capabilities(gid))
    }

    /// Returns the GIDs of present hosts: the administrator, the requester and all remaining hosts.
    fn gids(&self, from: Gid) -> impl Iterator<Item = Gid> {
        let own = self.config.gid;
        let first = std::iter::once(own).chain((from != own).then_some(from));
        let others = self.hosts.present();
        first.chain(others.filter(move |gid| *gid != own && *gid != from))
    }

    fn find_paths(
        &self,
        from: Gid,
        method: SaMethod,
        mask: PathMask,
        wanted: &PathRecord,
    ) -> Result<Records, Refusal> {
        let is_set = |gid, lid, value: U16| match mask {
            mask if mask.contains(gid) => End::Gid,
            mask if mask.contains(lid) && value.get() != 0 => End::Lid,
            _ => End::Any,
        };
        let source = is_set(PathMask::SGID, PathMask::SLID, wanted.slid);
        let destination = is_set(PathMask::DGID, PathMask::DLID, wanted.dlid);
        if destination == End::Any && method == SaMethod::Get {
            return Err(SaStatus::InsufficientComponents.into());
        }
        let sgid = match source {
            End::Gid => Some(wanted.sgid()),
            // A requester that has not responded to a probe yet has no LID.
            End::Lid if !self.hosts.is_present(from) => Some(from),
            End::Lid => self.hosts.with_lid(wanted.slid.get()),
            End::Any => Some(from),
        };
        let given = match destination {
            End::Gid => Some(wanted.dgid()),
            End::Lid => self.hosts.with_lid(wanted.dlid.get()),
            End::Any => None,
        };
        let all = (destination == End::Any).then(|| self.gids(from));
        let all = given.into_iter().chain(all.into_iter().flatten());
        let paths = all.filter_map(|dgid| {
            let mut path = self.path(sgid?, dgid)?;
            if source == End::Lid {
                path.slid = wanted.slid;
            }
            if destination == End::Lid {
                path.dlid = wanted.dlid;
            }
            paths::fit(path, mask, wanted)
        });
        let most = match mask.contains(PathMask::NUMB_PATH) {
            true => usize::from(wanted.count()),
            false => usize::MAX,
        };
        Ok(Records::of(paths.take(most)))
    }

    /// Returns the next MAD to send, and the host whose queue pair 1 is the destination.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<(Gid, Mad)> {
        if let Some(response) = self.responses.pop_front() {
            return Some(response);
        }
        let mut transfers = self.transfers.iter_mut();
        let segment = transfers.find_map(|(to, sender)| Some((*to, sender.poll_transmit(now)?)));
        segment.or_else(|| self.notices.poll_transmit(now))
    }

    /// Returns the time at which [`Self::handle_timeout`] should be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let transfers = self.transfers.iter().map(|(_, sender)| sender.deadline());
        let others = [
            self.hosts.deadline(),
            self.services.deadline(),
            self.notices.deadline(),
            self.ports.deadline(),
        ];
        transfers.chain(others.into_iter().flatten()).min()
    }

    /// Removes expired leases, unacknowledged responses and unresponsive hosts.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.services.handle_timeout(now);
        self.ports.handle_timeout(now);
        self.transfers
            .retain_mut(|(_, sender)| sender.handle_timeout(now) != Progress::Failed);
        self.notices.handle_timeout(now);
        if self.hosts.deadline().is_some_and(|at| at <= now) {
            self.sweep(now);
        }
    }
}

/// Returns all hosts with stored state.
fn keepers(
    services: &Services,
    groups: &Groups,
    notices: &Notices,
    ports: &Ports,
) -> FxHashSet<Gid> {
    let hosts = services.hosts().chain(groups.hosts());
    hosts.chain(notices.hosts()).chain(ports.hosts()).collect()
}

/// Builds a request that sets a record.
fn request<R: Record>(mask: u64, record: &R) -> Mad {
    SaHeader::new(MadMethod::Set, R::ATTRIBUTE, TransactionId(0), mask).emit(record.as_bytes())
}

/// Returns whether a method expects a response. Unsupported methods such as SubnAdmGetTraceTable()
/// do.
fn expects_response(method: u8) -> bool {
    const NONE: [u8; 3] = [
        MadMethod::Send as u8,
        MadMethod::Trap as u8,
        MadMethod::TrapRepress as u8,
    ];
    !NONE.contains(&method)
}

/// Parses the record of a request.
fn read<R: Record>(data: &[u8]) -> Result<R, Refusal> {
    R::read(data).ok_or_else(|| MadStatus::InvalidField.into())
}

/// Component that selects an end of a path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// GID, which has priority.
    Gid,
    /// LID.
    Lid,
    /// None.
    Any,
}

#[cfg(test)]
mod tests;
