//! A subnet administrator for fabrics of RoCE, which have none.
//!
//! On RoCE an address is a GID and every path is known, so paths are computed. What hosts report to the
//! administrator is kept: services with their leases ([`services`]), multicast groups with their
//! members ([`groups`]), and subscriptions to notices of that ([`notices`]). A host speaks for its own
//! GID only, from queue pair 1 to queue pair 1.
//!
//! A datagram's source can be forged. What a host sets is kept once the host has answered that it is
//! there ([`hosts`]), and for as long as it does. Who forges the address of such a host can still speak in
//! its name: this is a directory, and proves nothing. Bounds ([`Limits`]) hold for each host and for all
//! together; what is beyond is refused by ERR_NO_RESOURCES.

mod groups;
mod hosts;
mod notices;
mod paths;
mod services;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use riser_transport::roce::nic::device_guid;
use riser_transport::verbs::{Gid, Mtu};
use riser_transport::wire::mad::{
    BASE_VERSION, ClassPortInfo, MadClass, MadMethod, MadStatus, RESPONSE,
};
use riser_transport::wire::smp::{self, NodeInfo, PortInfo};
use riser_transport::wire::{Mad, TransactionId};
use rustc_hash::FxHashSet;
use zerocopy::big_endian::{U16, U32, U64};

use super::rmpp::{MAX_LEN, Progress, Sender};
use super::wire::inform::{InformInfo, InformInfoRecord, InformMask, Trap};
use super::wire::mcmember::McMemberRecord;
use super::wire::node::{NodeMask, NodeRecord, PortInfoMask, PortInfoRecord};
use super::wire::path::{PathMask, PathRecord};
use super::wire::service::ServiceRecord;
use super::wire::{CLASS_VERSION, DATA_LEN, Record, SaHeader, SaMethod, SaStatus, rmpp_type};
use groups::Groups;
use hosts::{Hosts, Place};
use notices::Notices;
use services::Services;

/// Answers that wait to be sent, at most; questions beyond are lost like any datagram.
const MAX_ANSWERS: usize = 256;

/// Time after which an answer of several MADs gives its place to another one, if none is free.
const PATIENCE: Duration = Duration::from_secs(5);

/// CapabilityMask of the class: IsUDMulticastSupported (IBTA table 158).
const UD_MULTICAST: u16 = 1 << 9;

/// Answers come within 4.096 µs × 2^18, about a second.
const RESPONSE_TIME: u8 = 18;

/// Static rate of 2.5 Gbit/s, the least that can be said: a socket has no speed.
const RATE: u8 = 2;

/// Packet life time: 4.096 µs × 2^18, about a second.
const LIFE_TIME: u8 = 18;

/// Hop limit of paths. Above 1 it also says that packets have a GRH, which all have on RoCE.
const HOP_LIMIT: u8 = 64;

/// Most that is kept.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Hosts that are known.
    pub hosts: usize,
    /// Service records, of all hosts and of each.
    pub services: (usize, usize),
    /// Multicast groups.
    pub groups: usize,
    /// Memberships of groups, of all hosts and of each.
    pub members: (usize, usize),
    /// Subscriptions to notices, of all hosts and of each.
    pub subscriptions: (usize, usize),
    /// Answers of several MADs under way, to all hosts and to each.
    pub transfers: (usize, usize),
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            hosts: 256,
            // All of them fit an answer.
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
    /// Its own GID.
    pub gid: Gid,
    /// Path MTU that it gives.
    pub mtu: Mtu,
    /// Bounds of what it keeps.
    pub limits: Limits,
    /// Random bytes that no other host knows: what hosts must answer follows from them.
    pub secret: [u8; 16],
}

impl AdministratorConfig {
    /// An administrator at an address.
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

/// Why a request is refused: a status of the answer.
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

/// Records of an answer.
struct Records {
    words: u16,
    count: usize,
    data: Vec<u8>,
}

impl Records {
    fn of<R: Record>(records: impl IntoIterator<Item = R>) -> Self {
        let (mut data, mut count) = (Vec::new(), 0);
        for record in records {
            // One more than fits says that they do not.
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

/// Numbers of what an administrator keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Hosts that are known.
    pub hosts: usize,
    /// Service records.
    pub services: usize,
    /// Multicast groups.
    pub groups: usize,
    /// Memberships of groups.
    pub members: usize,
    /// Subscriptions to notices.
    pub subscriptions: usize,
    /// Answers of several MADs under way.
    pub transfers: usize,
}

/// The administrator.
pub struct Administrator {
    config: AdministratorConfig,
    hosts: Hosts,
    services: Services,
    groups: Groups,
    notices: Notices,
    answers: VecDeque<(Gid, Mad)>,
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
    /// An administrator that knows of no host.
    #[must_use]
    pub fn new(config: AdministratorConfig) -> Self {
        let limits = config.limits;
        Self {
            hosts: Hosts::new(limits.hosts, config.gid, config.secret),
            services: Services::new(limits.services),
            groups: Groups::new(limits.groups, limits.members),
            notices: Notices::new(config.gid, limits.subscriptions, config.secret),
            answers: VecDeque::new(),
            transfers: Vec::new(),
            changes: 0,
            config,
        }
    }

    /// Numbers of what it keeps.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            hosts: self.hosts.len(),
            services: self.services.len(),
            groups: self.groups.len(),
            members: self.groups.members(),
            subscriptions: self.notices.len(),
            transfers: self.transfers.len(),
        }
    }

    /// Has another path MTU in all answers from now on.
    pub fn set_mtu(&mut self, mtu: Mtu) {
        self.config.mtu = mtu;
    }

    /// Path from one GID to another, as it is computed for every question.
    #[must_use]
    pub fn path(&self, sgid: Gid, dgid: Gid) -> Option<PathRecord> {
        paths::compute(self.config.mtu, &self.groups, sgid, dgid)
    }

    /// Path that a question's components ask for: the first one that a Get would bring.
    #[must_use]
    pub fn find_path(&self, mask: PathMask, wanted: &PathRecord) -> Option<PathRecord> {
        let path = self.path(wanted.sgid(), wanted.dgid())?;
        paths::fit(path, mask, wanted)
    }

    /// Takes a MAD that came from queue pair 1 of a host.
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
                .handle_answer(now, from, header.mad.transaction());
        } else if header.mad.method() & RESPONSE == 0 && is_answered(header.mad.method()) {
            self.handle_request(now, from, &header, data);
        }
    }

    /// Takes the answer of a host to what it was asked, and then the requests that have waited for it.
    fn handle_presence(&mut self, now: Instant, from: Gid, header: &SaHeader) {
        if header.mad.method() & RESPONSE == 0 {
            return;
        }
        let transaction = header.mad.transaction();
        let Some(answered) = self.hosts.handle_answer(now, from, transaction) else {
            return;
        };
        if answered.is_new {
            self.notices.raise(now, Trap::GidInService, from);
        }
        for mad in answered.restored {
            self.register(now, from, &mad);
        }
        for mad in answered.waiting {
            self.handle_mad(now, from, &mad);
        }
    }

    /// Requests by which hosts have made what is kept, each with its host: what an administrator after a
    /// restart takes by [`Self::restore`]. Hosts do not notice a restart, and do not ask again.
    #[must_use]
    pub fn requests(&self, now: Instant) -> Vec<(Gid, Mad)> {
        let services = self.services.requests(now);
        let (groups, notices) = (self.groups.requests(), self.notices.requests());
        let kept = services.chain(groups).chain(notices);
        // Those that an earlier administrator has left wait for their hosts, and outlive this one, too.
        kept.chain(self.hosts.restored()).collect()
    }

    /// Number of changes of what is kept, but for those that time has made.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Takes a request over from an administrator before a restart. It is carried out when its host has
    /// answered, and has no answer itself. A member that only sends is left out where no full member of its
    /// group has answered before: without one there is no group.
    pub fn restore(&mut self, now: Instant, host: Gid, mad: &Mad) {
        if host == self.config.gid {
            self.note(now, host);
            self.register(now, host, mad);
        } else if self.hosts.restore(now, host, mad) && self.answers.len() < MAX_ANSWERS {
            self.answers.push_back((host, self.hosts.question(host)));
        }
    }

    /// Carries a request out that has been answered before.
    fn register(&mut self, now: Instant, host: Gid, mad: &Mad) {
        if let Ok((header, data)) = SaHeader::parse(mad)
            && SaMethod::of(header.mad.method()) == Some(SaMethod::Set)
        {
            let result = self.answer(now, host, SaMethod::Set, &header, data);
            self.changes += u64::from(result.is_ok());
            if let Err(Refusal(status)) = result {
                let attribute = header.mad.attribute();
                tracing::info!(%host, attribute, status, "what a host had before a restart is refused");
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
        if self.answers.len() >= MAX_ANSWERS {
            return;
        }
        let is_known = self.note(now, from);
        let is_present = self.hosts.is_present(from);
        let method = SaMethod::of(header.mad.method());
        let is_change = matches!(method, Some(SaMethod::Set | SaMethod::Delete));
        if is_known && !is_present && is_change {
            self.answers.push_back((from, self.hosts.question(from)));
            self.hosts.hold(from, &header.emit(data));
            return;
        }
        let result = match method {
            _ if header.mad.class_version() != CLASS_VERSION => Err(MadStatus::BadVersion.into()),
            None => Err(MadStatus::UnsupportedMethod.into()),
            Some(SaMethod::Set) if !is_known => Err(SaStatus::NoResources.into()),
            Some(method) => self.answer(now, from, method, header, data),
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
        let answer = |status: u16, words: u16| SaHeader {
            mad: header.mad.response(MadStatus::Success).with_status(status),
            attribute_offset: U16::new(words),
            rmpp: super::wire::RmppHeader::default(),
            ..*header
        };
        let refused = match result {
            Ok(records) if is_table => {
                let answer = answer(0, records.words);
                self.begin_transfer(now, from, answer, records.data).err()
            }
            Ok(records) => {
                let mad = answer(0, records.words).emit(&records.data);
                self.answers.push_back((from, mad));
                None
            }
            Err(refusal) => Some(refusal),
        };
        if let Some(Refusal(status)) = refused {
            self.answers.push_back((from, answer(status, 0).emit(data)));
        }
        if is_known && !is_present {
            self.answers.push_back((from, self.hosts.question(from)));
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
        // The host repeats its question, and has forgotten what it had of the answer.
        let is_it = |(other, sender): &(Gid, Sender)| {
            *other == to && sender.header().mad.transaction() == transaction
        };
        self.transfers.retain(|transfer| !is_it(transfer));
        // A host that has acknowledged nothing may never have asked, be it this one.
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

    /// Notes that a host was heard; returns whether there is room for it.
    fn note(&mut self, now: Instant, gid: Gid) -> bool {
        let (services, groups, notices) = (&self.services, &self.groups, &self.notices);
        let keepers = || keepers(services, groups, notices);
        match self.hosts.note(now, gid, keepers) {
            Place::Taken { left } => {
                if let Some(left) = left {
                    self.notices.raise(now, Trap::GidOutOfService, left);
                }
                true
            }
            Place::None => false,
        }
    }

    /// Ends everything that a host keeps.
    fn remove(&mut self, now: Instant, gid: Gid) {
        self.changes += 1;
        self.services.remove(gid);
        self.notices.remove(gid);
        for mgid in self.groups.remove(gid) {
            self.notices.raise(now, Trap::GroupDeleted, mgid);
        }
    }

    fn sweep(&mut self, now: Instant) {
        let keepers = keepers(&self.services, &self.groups, &self.notices);
        let silent = self.hosts.sweep(now, &keepers);
        for (gid, was_present) in silent.gone {
            self.remove(now, gid);
            if was_present {
                self.notices.raise(now, Trap::GidOutOfService, gid);
            }
        }
        // Beside the bound of answers: hosts are few, and one that was not asked would count as silent.
        for gid in silent.asked {
            self.answers.push_back((gid, self.hosts.question(gid)));
        }
    }

    fn answer(
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
                let all = self.gids(from).map(node_record);
                Ok(Records::of(all.filter(|node| node.matches(mask, &wanted))))
            }
            (PortInfoRecord::ATTRIBUTE, SaMethod::Get | SaMethod::GetTable) => {
                let (mask, wanted) = (PortInfoMask::from_bits_retain(mask), read(data)?);
                let modifier = header.mad.modifier();
                let all = self
                    .gids(from)
                    .map(|gid| port_info_record(gid, self.config.mtu));
                let all = all.filter(|port| port.matches(mask, &wanted, modifier));
                Ok(Records::of(all))
            }
            (ClassPortInfo::ATTRIBUTE, SaMethod::Get) => Ok(Records::of([ClassPortInfo::new(
                CLASS_VERSION,
                UD_MULTICAST,
                RESPONSE_TIME,
            )])),
            _ => Err(MadStatus::UnsupportedAttribute.into()),
        }
    }

    /// GIDs of the hosts that are there: its own, that of the one that asks, and others.
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
        let sgid = if mask.contains(PathMask::SGID) {
            wanted.sgid()
        } else {
            from
        };
        let given = mask.contains(PathMask::DGID).then(|| wanted.dgid());
        if given.is_none() && method == SaMethod::Get {
            return Err(SaStatus::InsufficientComponents.into());
        }
        let all = given
            .is_none()
            .then(|| self.gids(from))
            .into_iter()
            .flatten();
        let paths = given.into_iter().chain(all).filter_map(|dgid| {
            let path = self.path(sgid, dgid)?;
            paths::fit(path, mask, wanted)
        });
        let most = match mask.contains(PathMask::NUMB_PATH) {
            true => usize::from(wanted.count()),
            false => usize::MAX,
        };
        Ok(Records::of(paths.take(most)))
    }

    /// The next MAD to send, and the host whose queue pair 1 gets it.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<(Gid, Mad)> {
        if let Some(answer) = self.answers.pop_front() {
            return Some(answer);
        }
        let mut transfers = self.transfers.iter_mut();
        let segment = transfers.find_map(|(to, sender)| Some((*to, sender.poll_transmit(now)?)));
        segment.or_else(|| self.notices.poll_transmit(now))
    }

    /// Time at which [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let transfers = self.transfers.iter().map(|(_, sender)| sender.deadline());
        let others = [
            self.hosts.deadline(),
            self.services.deadline(),
            self.notices.deadline(),
        ];
        transfers.chain(others.into_iter().flatten()).min()
    }

    /// Ends what is over: leases, answers that are not acknowledged, hosts that are no longer there.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.services.handle_timeout(now);
        self.transfers
            .retain_mut(|(_, sender)| sender.handle_timeout(now) != Progress::Failed);
        self.notices.handle_timeout(now);
        if self.hosts.deadline().is_some_and(|at| at <= now) {
            self.sweep(now);
        }
    }
}

/// Hosts that keep something.
fn keepers(services: &Services, groups: &Groups, notices: &Notices) -> FxHashSet<Gid> {
    let hosts = services.hosts().chain(groups.hosts());
    hosts.chain(notices.hosts()).collect()
}

/// A request that sets a record.
fn request<R: Record>(mask: u64, record: &R) -> Mad {
    SaHeader::new(MadMethod::Set, R::ATTRIBUTE, TransactionId(0), mask).emit(record.as_bytes())
}

/// Whether a method asks for an answer: SubnAdmGetTraceTable() and others that are not supported do.
fn is_answered(method: u8) -> bool {
    const NONE: [u8; 3] = [
        MadMethod::Send as u8,
        MadMethod::Trap as u8,
        MadMethod::TrapRepress as u8,
    ];
    !NONE.contains(&method)
}

/// The record of a request.
fn read<R: Record>(data: &[u8]) -> Result<R, Refusal> {
    R::read(data).ok_or_else(|| MadStatus::InvalidField.into())
}

/// High and low half of a GID.
fn halves(gid: Gid) -> (u64, u64) {
    let gid = u128::from_be_bytes(gid.0);
    ((gid >> 64) as u64, gid as u64)
}

fn node_record(gid: Gid) -> NodeRecord {
    const CHANNEL_ADAPTER: u8 = 1;
    let guid = U64::new(device_guid(gid.ip()));
    let mut description = [0; 64];
    let name = gid.ip().to_string();
    description[..name.len()].copy_from_slice(name.as_bytes());
    NodeRecord {
        lid: U16::ZERO,
        reserved: U16::ZERO,
        info: NodeInfo {
            base_version: BASE_VERSION,
            class_version: smp::CLASS_VERSION,
            node_type: CHANNEL_ADAPTER,
            ports: 1,
            system_image_guid: guid,
            node_guid: guid,
            port_guid: U64::new(halves(gid).1),
            partition_cap: U16::new(1),
            device_id: U16::ZERO,
            revision: U32::ZERO,
            port_and_vendor: U32::new(1 << 24),
        },
        description,
    }
}

fn port_info_record(gid: Gid, mtu: Mtu) -> PortInfoRecord {
    /// Active and linked; one lane of 2.5 Gbit/s, the least that can be said.
    const ACTIVE: u8 = 4;
    const LINKED: u8 = 5;
    let mut info = PortInfo::default();
    info.gid_prefix = U64::new(halves(gid).0);
    info.capabilities = U32::new(1 << 16);
    info.local_port = 1;
    info.link_width_enabled = 1;
    info.link_width_supported = 1;
    info.link_width_active = 1;
    info.speed_supported_and_state = 1 << 4 | ACTIVE;
    info.physical_state = LINKED << 4 | 2;
    info.speed_active_and_enabled = 1 << 4 | 1;
    info.neighbor_mtu = mtu.code() << 4;
    info.vl_cap = 1 << 4;
    info.mtu_cap = mtu.code();
    info.operational_vls = 1 << 4;
    info.guid_cap = 1;
    info.response_time = RESPONSE_TIME;
    PortInfoRecord {
        lid: U16::ZERO,
        port: 1,
        options: 0,
        info,
    }
}

#[cfg(test)]
mod tests;
