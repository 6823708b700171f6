//! The Ethernet manager: discovers hosts, assigns LIDs to their ports, configures them, and
//! distributes paths and MAC tables.
//!
//! Once per [`ManagerConfig::interval`] the manager queries the class port information of the whole
//! multicast group; hosts that respond are members. A member that has not responded for
//! [`ManagerConfig::dead_after`] is removed, and the remaining members receive tables without it.
//! Everything else follows from the difference between the current and the desired state of a
//! member, with one request in flight per member:
//!
//! ```text
//!  found → claimed → read → configured → paths → addresses read → MAC table → polled
//!                              ↑            ↑          ↑             ↑          │
//!                              └────────────┴── changed state ───────┴──────────┘
//! ```
//!
//! Therefore a restarted member, a lost change and a restarted manager need no special handling. A
//! restarted manager preserves the LIDs of members, and assigns no new LIDs until all members have
//! had time to respond. The LID of a member is derived from its address, so it gets the same LID
//! after an absence and after a restart of all members. Members can only compete for a LID if their
//! addresses have the same suffix.
//!
//! Members do not trust each other. Requests to a member are limited to [`MAX_REQUESTS`] per port
//! and interval, which bounds the cost of a member that never complies. Tables that change
//! repeatedly are distributed at decreasing rates, down to once per interval, because each table is
//! sent to all members. An address belongs to the member that has it in the table; an address that
//! encodes a LID belongs to the member with that LID.

mod config;
mod plan;
mod tables;

use std::collections::BTreeSet;
use std::iter;
use std::time::{Duration, Instant};

use riser_transport::verbs::Gid;
use zerocopy::FromBytes;

pub use config::{ManagerConfig, VeswConfig};
use tables::Tables;

use super::QpAddress;
use super::port::{MAX_IFACE_MACS, MAX_PATHS};
use super::vema::OWNER_TIMEOUT;
use super::wire::attr::{
    EndPoint, IfaceMacsHeader, MacTableHeader, VeswPortInfo, entries, id, state,
};
use super::wire::mad::{ClassPortInfo, HEADER, MAX, VemaHeader, method, status};
use super::wire::{Lid, Mac, fnv1a};

/// Maximum number of members.
pub const MAX_MEMBERS: usize = MAX_PATHS;
/// Time before a request is retransmitted.
const RETRY: Duration = Duration::from_millis(300);
/// Pause after a member rejected a request.
const REFUSED: Duration = Duration::from_secs(2);
/// Time after which a member's other manager is considered active. A member that lost its manager
/// accepts another one, whose requests are repeated, within this time.
const RIVAL: Duration = OWNER_TIMEOUT
    .saturating_add(REFUSED)
    .saturating_add(REFUSED);
/// Minimum interval between two tables, so that concurrent changes are combined.
const MIN_SPACING: Duration = Duration::from_millis(50);
/// Maximum number of requests to a member per port and interval. Changing the complete
/// configuration of a port requires about 100.
pub const MAX_REQUESTS: u32 = 512;
/// Time for members to respond to the first discovery with LIDs assigned by a previous manager.
pub(super) const FIRST_SEARCH: Duration = Duration::from_secs(1);
/// Bits of an address that form the LID, unless they are 0. The highest LID bit is excluded: it
/// marks spare and multicast LIDs.
const LID_OF_ADDRESS: u32 = 0x7f_ffff;
/// First spare LID, for members whose address suffix equals that of another member. Spare LIDs end
/// before the multicast LIDs.
const FIRST_SPARE: Lid = Lid(LID_OF_ADDRESS + 1);
/// Number of spare LIDs, which exceeds the maximum number of members.
const SPARES: u32 = Lid::MULTICAST.0 - FIRST_SPARE.0;
/// Transaction bit of requests to the whole group.
const DISCOVERY: u64 = 1 << 63;

/// Destination of a datagram from the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MadDestination {
    /// All hosts, via the multicast group of the fabric.
    Group,
    /// A single member.
    Member(QpAddress),
}

/// State of a member's port, as reported and as configured.
#[derive(Clone, Debug, Default)]
struct PortRecord {
    end: Option<EndPoint>,
    info: Option<VeswPortInfo>,
    polled: Option<Instant>,
    /// Unicast addresses of the interface, and their generation.
    macs: Vec<Mac>,
    macs_of: Option<u16>,
    /// Addresses of a list that is being read.
    reading: Vec<Mac>,
    /// Digest of the port's current paths.
    paths: Option<u32>,
    /// Digest of a partially sent table, and the number of entries sent.
    sending: Option<(u32, usize)>,
    /// Entries of the MAC table beyond this index are empty. `None` until the table has been sent
    /// once.
    filled: Option<usize>,
}

#[derive(Clone, Debug)]
struct Outstanding {
    tid: u64,
    attr: u16,
    vport: u8,
    /// Number of entries in the pending request, and the digest of their table.
    sent_entries: (usize, u32),
    mad: Vec<u8>,
    sent: Instant,
}

#[derive(Clone, Debug)]
struct Member {
    address: QpAddress,
    /// Transaction of the discovery that found its queue pair.
    found_by: u64,
    last_seen: Instant,
    is_claimed: bool,
    lid: Option<Lid>,
    ports: Vec<PortRecord>,
    outstanding: Option<Outstanding>,
    /// No requests before this time, because a request was rejected or the limit was reached.
    waits: Option<Instant>,
    /// Number of requests in the current interval, and the start of the interval.
    queries: (u32, Instant),
    /// Another manager that controls the member, and since when.
    other_manager: Option<(Gid, Instant)>,
}

/// Returns the candidate LIDs of a member in order of preference. The first is the suffix of its
/// address, which is unique unless suffixes are equal. The spare LIDs for equal suffixes start at a
/// LID derived from the whole address.
fn lids_of(gid: Gid) -> impl Iterator<Item = Lid> {
    let [.., a, b, c, d] = gid.0;
    let own = (u32::from_be_bytes([a, b, c, d]) & LID_OF_ADDRESS).max(1);
    let first = fnv1a(&gid.0) % SPARES;
    let spares = (0..SPARES).map(move |n| FIRST_SPARE.0 + (first + n) % SPARES);
    iter::once(own).chain(spares).map(Lid)
}

impl Member {
    fn new(address: QpAddress, found_by: u64, ports: usize, now: Instant) -> Self {
        Self {
            address,
            found_by,
            last_seen: now,
            is_claimed: false,
            lid: None,
            ports: vec![PortRecord::default(); ports],
            outstanding: None,
            waits: None,
            queries: (0, now),
            other_manager: None,
        }
    }

    /// Returns whether the member reported that it has no LID and has not been assigned one since.
    fn is_new(&self) -> bool {
        self.lid.is_none() && self.ports.iter().any(|port| port.info.is_some())
    }

    /// Clears the port state, except its LID, pending request and manager.
    fn restart(&mut self, ports: usize, now: Instant) {
        *self = Self {
            lid: self.lid,
            queries: self.queries,
            other_manager: self.other_manager,
            ..Self::new(self.address, self.found_by, ports, now)
        };
    }
}

/// Public status of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Address of the member's agent.
    pub address: QpAddress,
    /// LID of its ports, once assigned.
    pub lid: Option<Lid>,
    /// All ports are completely configured.
    pub is_complete: bool,
    /// Another manager that controls the member.
    pub other_manager: Option<Gid>,
}

/// Ethernet manager.
#[derive(Clone, Debug)]
pub struct EthernetManager {
    config: ManagerConfig,
    members: Vec<Member>,
    tables: Vec<Tables>,
    tid: u64,
    /// Transaction of the last discovery.
    searched: u64,
    search: Option<Instant>,
    /// Time from which new members are assigned LIDs. `None` before the first discovery.
    admits: Option<Instant>,
    /// The tables must be rebuilt when they are due.
    is_changed: bool,
    rebuild_at: Option<Instant>,
    /// Interval between the current table and the next.
    spacing: Duration,
    /// The maximum number of members was exceeded since the last discovery.
    is_full: bool,
    /// Another manager that was reported and still controls members.
    warned: Option<Gid>,
}

impl EthernetManager {
    /// Creates a manager without members.
    ///
    /// # Panics
    /// If there are no switches or more than 255, or if the maximum datagram length is too short.
    #[must_use]
    pub fn new(config: ManagerConfig) -> Self {
        assert!((1..=255).contains(&config.vesws.len()));
        assert!(config.max_mad >= super::MIN_PATH_MTU);
        let mut manager = Self {
            members: Vec::new(),
            tables: vec![Tables::default(); config.vesws.len()],
            tid: config.first_tid & !DISCOVERY,
            searched: 0,
            search: None,
            admits: None,
            is_changed: false,
            rebuild_at: None,
            spacing: MIN_SPACING,
            is_full: false,
            warned: None,
            config,
        };
        manager.make_tables();
        manager
    }

    /// Returns the members in order of discovery.
    pub fn members(&self) -> impl Iterator<Item = MemberStatus> {
        self.members.iter().map(|member| MemberStatus {
            address: member.address,
            lid: member.lid,
            is_complete: member.is_claimed
                && (0..member.ports.len()).all(|vport| self.is_complete(member, vport)),
            other_manager: member.other_manager.map(|(manager, _)| manager),
        })
    }

    fn is_complete(&self, member: &Member, vport: usize) -> bool {
        let (port, tables) = (&member.ports[vport], &self.tables[vport]);
        self.is_configured(member, vport)
            && port.paths == Some(tables.paths_digest)
            && port
                .info
                .is_some_and(|info| info.vport.mac_tbl_digest.get() == tables.digest)
    }

    /// Returns the maximum attribute length of a request, in bytes.
    fn room(&self) -> usize {
        self.config.max_mad.min(MAX) - HEADER
    }

    /// Returns the next datagram and its destination. Removes unresponsive members.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<(MadDestination, Vec<u8>)> {
        self.forget_silent(now);
        if self.admits.is_some_and(|from| from <= now) {
            self.assign_lids();
        }
        if self.is_changed && self.rebuild_at.is_none_or(|rebuild_at| rebuild_at <= now) {
            self.rebuild_tables(now);
        }
        if self.search.is_none_or(|next| next <= now) {
            self.is_full = false;
            self.warn_of_managers(now);
            self.search = Some(now + self.config.interval);
            self.admits.get_or_insert(now + FIRST_SEARCH);
            self.tid = self.tid.wrapping_add(1) & !DISCOVERY;
            self.searched = self.tid | DISCOVERY;
            let header = VemaHeader::new(method::GET, id::CLASS_PORT_INFO, 0, self.searched);
            return Some((MadDestination::Group, header.with(&[])));
        }
        (0..self.members.len()).find_map(|index| self.poll_member(index, now))
    }

    fn poll_member(&mut self, index: usize, now: Instant) -> Option<(MadDestination, Vec<u8>)> {
        let to = MadDestination::Member(self.members[index].address);
        if let Some(request) = &mut self.members[index].outstanding {
            if now < request.sent + RETRY {
                return None;
            }
            request.sent = now;
            return Some((to, request.mad.clone()));
        }
        let interval = self.config.interval;
        let member = &mut self.members[index];
        if member.waits.is_some_and(|until| now < until) {
            return None;
        }
        member.waits = None;
        let (queries, since) = &mut member.queries;
        if *since + interval <= now {
            (*queries, *since) = (0, now);
        }
        if *queries >= MAX_REQUESTS * member.ports.len() as u32 {
            tracing::debug!(host = %member.address.gid, "too many requests to a member, retrying later");
            member.waits = Some(*since + interval);
            return None;
        }
        let request = self.plan(index, now)?;
        self.tid = self.tid.wrapping_add(1) & !DISCOVERY;
        let header = VemaHeader::new(request.method, request.attr, request.vport.into(), self.tid);
        let mad = header.with(&request.data);
        self.members[index].queries.0 += 1;
        self.members[index].outstanding = Some(Outstanding {
            tid: self.tid,
            attr: request.attr,
            vport: request.vport,
            sent_entries: request.sent_entries,
            mad: mad.clone(),
            sent: now,
        });
        Some((to, mad))
    }

    /// Returns the time of the next datagram or removal, if no datagram arrives before.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let of_member = |member: &Member| {
            let next = match (&member.outstanding, member.waits) {
                (Some(request), _) => Some(request.sent + RETRY),
                (None, Some(until)) => Some(until),
                (None, None) => {
                    let next = |port: &PortRecord| {
                        let polled = port.polled.map(|polled| polled + self.config.interval);
                        polled.unwrap_or(member.last_seen)
                    };
                    member.ports.iter().map(next).min()
                }
            };
            let dead = member.last_seen + self.config.dead_after;
            next.map_or(dead, |next| next.min(dead))
        };
        let members = self.members.iter().map(of_member);
        let rebuild_at = self.rebuild_at.filter(|_| self.is_changed);
        let is_awaited = self.members.iter().any(Member::is_new);
        let admits = self.admits.filter(|_| is_awaited);
        let others = [self.search, rebuild_at, admits].into_iter().flatten();
        members.chain(others).min()
    }

    /// Handles a datagram: a response or a trap.
    pub fn handle_mad(&mut self, from: QpAddress, mad: &[u8], now: Instant) {
        let Some((header, data)) = VemaHeader::parse(mad) else {
            return;
        };
        match header.method {
            method::GET_RESP if header.tid.get() & DISCOVERY != 0 => {
                let is_last = header.tid.get() == self.searched;
                if is_last && header.attr_id.get() == id::CLASS_PORT_INFO {
                    self.find(from, data, now);
                }
            }
            method::GET_RESP => self.handle_response(from, &header, data, now),
            method::TRAP => self.handle_trap(from),
            _ => {}
        }
    }

    /// Handles a discovery response, which also names the manager that controls the host. Each host
    /// has one queue pair per discovery; responses from any other queue pair of the host are
    /// ignored.
    fn find(&mut self, from: QpAddress, data: &[u8], now: Instant) {
        let (ports, searched) = (self.tables.len(), self.searched);
        let is_full = self.members.len() >= MAX_MEMBERS;
        let known = self.members.iter_mut().find(|m| m.address.gid == from.gid);
        match known {
            Some(member) if member.address == from => member.last_seen = now,
            Some(member) if member.found_by == searched => {}
            Some(member) => {
                tracing::info!(host = %from.gid, "member restarted");
                (member.address, member.found_by) = (from, searched);
                member.restart(ports, now);
                self.is_changed = true;
            }
            None if !is_full => {
                tracing::info!(host = %from.gid, "found a new member");
                self.members.push(Member::new(from, searched, ports, now));
            }
            None if !self.is_full => {
                tracing::warn!(host = %from.gid, "too many members, ignoring further hosts");
                self.is_full = true;
            }
            None => {}
        }
        self.note_manager(from, data, now);
    }

    /// Records which manager controls a member.
    fn note_manager(&mut self, from: QpAddress, data: &[u8], now: Instant) {
        let own = self.config.address.gid;
        let Ok((info, _)) = ClassPortInfo::read_from_prefix(data) else {
            return;
        };
        let manager = Gid(info.trap_gid);
        let member = self.members.iter_mut().find(|m| m.address == from);
        if let Some(member) = member
            && info.trap_lid.get() != 0
            && manager != own
            && !member.is_claimed
        {
            let (known, _) = *member.other_manager.get_or_insert((manager, now));
            if known != manager {
                member.other_manager = Some((manager, now));
            }
        }
    }

    /// Warns about another manager. Members of two managers in one group cannot reach each other. A
    /// manager that stopped is still reported by members for a while.
    fn warn_of_managers(&mut self, now: Instant) {
        let other = |member: &Member| {
            let (manager, since) = member.other_manager?;
            (since + RIVAL <= now).then_some((member.address.gid, manager))
        };
        let mut others = self.members.iter().filter_map(other);
        let found = others.next();
        if let Some((host, manager)) = found
            && self.warned != Some(manager)
        {
            let members = 1 + others.count();
            tracing::warn!(%host, %manager, members, "member is controlled by another manager");
        }
        self.warned = found.map(|(_, manager)| manager);
    }

    fn forget_silent(&mut self, now: Instant) {
        let before = self.members.len();
        let dead_after = self.config.dead_after;
        self.members.retain(|member| {
            let is_alive = now < member.last_seen + dead_after;
            if !is_alive {
                tracing::info!(host = %member.address.gid, "member timed out, removing it");
            }
            is_alive
        });
        if self.members.len() != before {
            self.is_changed = true;
        }
    }

    /// Handles a trap: the member's ports will be read next. The trap itself is not trusted, and
    /// there is only one request in flight, so traps cannot be used to overload the manager.
    fn handle_trap(&mut self, from: QpAddress) {
        let member = self.members.iter_mut().find(|m| m.address == from);
        for port in member.into_iter().flat_map(|member| &mut member.ports) {
            port.polled = None;
        }
    }

    fn handle_response(&mut self, from: QpAddress, header: &VemaHeader, data: &[u8], now: Instant) {
        let is_of = |member: &Member| {
            let tid = member.outstanding.as_ref().map(|request| request.tid);
            member.address == from && tid == Some(header.tid.get())
        };
        let Some(index) = self.members.iter().position(is_of) else {
            return;
        };
        let Some(request) = self.members[index].outstanding.take() else {
            return;
        };
        let member = &mut self.members[index];
        member.last_seen = now;
        member.waits = None;
        let is_done = header.status.get() == status::OK
            && self.apply_response(index, &request, data, now).is_some();
        if !is_done {
            let (attr, status) = (request.attr, header.status.get());
            tracing::info!(host = %from.gid, attr, status, "member rejected a request");
            let member = &mut self.members[index];
            // The member may have lost its state, or is controlled by another manager.
            member.restart(self.tables.len(), now);
            member.waits = Some(now + REFUSED);
            self.is_changed = true;
        }
    }

    /// Handles a successful response. Returns `None` if it does not match the request.
    fn apply_response(
        &mut self,
        index: usize,
        request: &Outstanding,
        data: &[u8],
        now: Instant,
    ) -> Option<()> {
        let vport = usize::from(request.vport);
        let member = &mut self.members[index];
        let port = member.ports.get_mut(vport)?;
        match request.attr {
            id::CLASS_PORT_INFO => {
                let info = ClassPortInfo::read_from_prefix(data).ok()?.0;
                // A member with fewer ports than switches only joins the first switches.
                member.ports.truncate(info.vports().max(1).into());
                member.is_claimed = true;
                member.other_manager = None;
            }
            id::END_POINT => {
                let end = EndPoint::read_from_prefix(data).ok()?.0;
                if usize::from(end.mtu.get()) < super::MIN_PATH_MTU {
                    return None;
                }
                port.end = Some(end);
                self.is_changed = true;
            }
            id::VESWPORT_INFO => {
                let info = VeswPortInfo::read_from_prefix(data).ok()?.0;
                let is_first = port.info.is_none();
                if is_first && info.vport.mac_tbl_digest.get() == 0 {
                    port.filled = Some(0);
                }
                // A port that was reset has lost its tables.
                if info.vport.oper_state != state::FORWARDING {
                    port.paths = None;
                }
                port.info = Some(info);
                port.polled = Some(now);
                if member.lid.is_none() {
                    self.keep_lid(index, vport, &info);
                }
            }
            id::PATHS => {
                let (count, digest) = request.sent_entries;
                let next = Self::next_entry(port, digest) + count;
                let total = self.tables[vport].paths.len();
                let is_current = digest == self.tables[vport].paths_digest;
                let is_all = is_current && next >= total;
                port.sending = (is_current && !is_all).then_some((digest, next));
                if is_all {
                    port.paths = Some(digest);
                }
            }
            id::IFACE_UCAST_MACS => {
                let (header, rest) = IfaceMacsHeader::read_from_prefix(data).ok()?;
                let macs = entries::<Mac>(rest, header.num_macs_in_msg.get())?;
                if usize::from(header.start_idx.get()) == port.reading.len() {
                    port.reading.extend_from_slice(macs);
                }
                let total = usize::from(header.tot_macs_in_lst.get()).min(MAX_IFACE_MACS);
                // The list is complete. Changes during the transfer increment the generation, which
                // causes another read.
                if macs.is_empty() || port.reading.len() >= total {
                    let mut macs = std::mem::take(&mut port.reading);
                    macs.truncate(MAX_IFACE_MACS);
                    self.is_changed |= macs != port.macs;
                    port.macs = macs;
                    port.macs_of = Some(header.gen_count.get());
                    if let Some(info) = &mut port.info {
                        info.vport.uc_macs_gen_count = header.gen_count;
                    }
                }
            }
            id::VESWPORT_MAC_ENTRIES => {
                let header = MacTableHeader::read_from_prefix(data).ok()?.0;
                let (count, digest) = request.sent_entries;
                let tables = &self.tables[vport];
                let next = Self::next_entry(port, digest) + count;
                let end = Self::table_end(port, tables);
                // If the table changed during the transfer, some of the new entries are already in
                // place.
                port.filled = Some(end.max(next));
                port.sending = None;
                if digest == tables.digest && next < end {
                    port.sending = Some((digest, next));
                } else if digest == tables.digest {
                    port.filled = Some(tables.entries.len());
                    port.info.as_mut()?.vport.mac_tbl_digest = header.mac_tbl_digest;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Preserves the LID assigned by a previous manager unless another member has it. Only the two
    /// LIDs derived from the member's address are accepted.
    fn keep_lid(&mut self, index: usize, vport: usize, info: &VeswPortInfo) {
        let had = Lid(info.vport.encap_slid.get());
        let is_ours = info.vesw.vesw_id.get() == self.config.vesws[vport].vesw_id;
        let mut own = lids_of(self.members[index].address.gid).take(2);
        let is_taken = self.members.iter().any(|m| m.lid == Some(had));
        if is_ours && !is_taken && own.any(|lid| lid == had) {
            self.members[index].lid = Some(had);
            self.is_changed = true;
        }
    }

    /// Assigns the first available candidate LID to each new member.
    fn assign_lids(&mut self) {
        if !self.members.iter().any(Member::is_new) {
            return;
        }
        let mut taken: BTreeSet<_> = self.members.iter().filter_map(|m| m.lid).collect();
        for member in self.members.iter_mut().filter(|member| member.is_new()) {
            member.lid = lids_of(member.address.gid).find(|lid| !taken.contains(lid));
            taken.extend(member.lid);
        }
        self.is_changed = true;
    }
}

#[cfg(test)]
mod tests;
