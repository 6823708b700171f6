//! Multicast groups and their members.
//!
//! On RoCE a multicast group is an IP address that hosts also join via IGMP or MLD. This module
//! stores the remaining attributes: queue key, partition, MTU, senders and receivers.

use riser_transport::verbs::{Gid, Mtu};
use riser_transport::wire::Mad;
use zerocopy::big_endian::U16;

use super::super::wire::inform::Trap;
use super::super::wire::mcmember::{McMemberMask, McMemberRecord, join_state};
use super::super::wire::{Limit, SaMethod, SaStatus, Selector, all_match};
use super::{HOP_LIMIT, LIFE_TIME, RATE, Records, Refusal, request};

/// First LID of a multicast group (IBTA 4.1.3).
const FIRST_MLID: u16 = 0xc000;

/// Memberships that keep a group alive.
const FULL: u8 = join_state::FULL_MEMBER | join_state::SEND_ONLY_FULL_MEMBER;

/// Fields required to create a membership, and to restore a group with the same attributes.
const MEMBERSHIP: McMemberMask = McMemberMask::CREATE
    .union(McMemberMask::MGID)
    .union(McMemberMask::PORT_GID)
    .union(McMemberMask::MLID)
    .union(McMemberMask::MTU_SELECTOR)
    .union(McMemberMask::MTU)
    .union(McMemberMask::RATE_SELECTOR)
    .union(McMemberMask::RATE)
    .union(McMemberMask::PACKET_LIFE_TIME)
    .union(McMemberMask::HOP_LIMIT)
    .union(McMemberMask::JOIN_STATE);

#[derive(Clone, Copy)]
struct Member {
    gid: Gid,
    join_state: u8,
}

impl Member {
    fn is_full(&self) -> bool {
        self.join_state & FULL != 0
    }
}

struct Group {
    /// Attributes shared by all members. PortGID and JoinState are zero.
    record: McMemberRecord,
    members: Vec<Member>,
}

impl Group {
    /// Returns whether the group has a full member left (IBTA 15.2.5.17.4).
    fn is_alive(&self) -> bool {
        self.members.iter().any(Member::is_full)
    }

    fn record_for(&self, gid: Gid, join_state: u8) -> McMemberRecord {
        let record = McMemberRecord {
            port_gid: gid.0,
            ..self.record
        };
        record.with_state(self.record.scope(), join_state)
    }
}

/// Groups of the fabric.
pub(super) struct Groups {
    most: usize,
    /// Maximum number of memberships: total, per host.
    limits: (usize, usize),
    all: Vec<Group>,
    /// Number of the next group with an allocated GID.
    next: u16,
}

/// Creation or deletion of a group.
pub(super) type Event = Option<(Trap, Gid)>;

impl Groups {
    pub(super) fn new(most: usize, limits: (usize, usize)) -> Self {
        Self {
            most,
            limits,
            all: Vec::new(),
            next: 1,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn members(&self) -> usize {
        self.all.iter().map(|group| group.members.len()).sum()
    }

    fn memberships(&self, gid: Gid) -> usize {
        let members = self.all.iter().flat_map(|group| &group.members);
        members.filter(|member| member.gid == gid).count()
    }

    /// Returns the hosts of all memberships. A host may occur several times.
    pub(super) fn hosts(&self) -> impl Iterator<Item = Gid> {
        let members = self.all.iter().flat_map(|group| &group.members);
        members.map(|member| member.gid)
    }

    /// Returns requests that recreate the memberships. Full members come first, because they create
    /// the groups.
    pub(super) fn requests(&self) -> impl Iterator<Item = (Gid, Mad)> {
        let all = [true, false].into_iter().flat_map(|is_full| {
            let all = self.all.iter();
            let all = all.flat_map(|group| group.members.iter().map(move |member| (group, member)));
            all.filter(move |(_, member)| member.is_full() == is_full)
        });
        all.map(|(group, member)| {
            let record = group.record_for(member.gid, member.join_state);
            (member.gid, request(MEMBERSHIP.bits(), &record))
        })
    }

    /// Removes all memberships of a host and returns the deleted groups.
    pub(super) fn remove(&mut self, gid: Gid) -> Vec<Gid> {
        let mut ended = Vec::new();
        self.all.retain_mut(|group| {
            let before = group.members.len();
            group.members.retain(|member| member.gid != gid);
            let is_over = group.members.len() != before && !group.is_alive();
            if is_over {
                ended.push(group.record.mgid());
            }
            !is_over
        });
        ended
    }

    /// Returns the attributes shared by all members of a group.
    pub(super) fn find(&self, mgid: Gid) -> Option<&McMemberRecord> {
        let group = self.all.iter().find(|group| group.record.mgid() == mgid)?;
        Some(&group.record)
    }

    pub(super) fn handle(
        &mut self,
        from: Gid,
        method: SaMethod,
        mask: u64,
        wanted: &McMemberRecord,
        mtu: Mtu,
    ) -> Result<(Records, Event), Refusal> {
        let mask = McMemberMask::from_bits_retain(mask);
        match method {
            SaMethod::Get | SaMethod::GetTable => Ok((self.find_groups(from, mask, wanted), None)),
            SaMethod::Set => {
                let wanted = own(from, mask, wanted)?;
                let (record, event) = self.join(from, mask, &wanted, mtu)?;
                Ok((Records::of([record]), event))
            }
            SaMethod::Delete => {
                let wanted = own(from, mask, wanted)?;
                let (record, event) = self.leave(from, &wanted)?;
                Ok((Records::of([record]), event))
            }
        }
    }

    /// Returns matching groups. Membership is only reported to the requester itself.
    fn find_groups(&self, from: Gid, mask: McMemberMask, wanted: &McMemberRecord) -> Records {
        let groups = self
            .all
            .iter()
            .filter(|group| fits(&group.record, mask, wanted));
        let own = mask.contains(McMemberMask::PORT_GID);
        let records = groups.filter_map(|group| {
            let members = &group.members;
            let record = if own {
                let is_it = |m: &&Member| m.gid == from && m.gid == wanted.port_gid();
                let member = members.iter().find(is_it)?;
                group.record_for(from, member.join_state)
            } else {
                let states = members
                    .iter()
                    .fold(0, |all, member| all | member.join_state);
                group.record_for(Gid([0; 16]), states)
            };
            let state = wanted.join_state();
            let has_state =
                !mask.contains(McMemberMask::JOIN_STATE) || record.join_state() & state == state;
            has_state.then_some(record)
        });
        Records::of(records)
    }

    fn join(
        &mut self,
        from: Gid,
        mask: McMemberMask,
        wanted: &McMemberRecord,
        mtu: Mtu,
    ) -> Result<(McMemberRecord, Event), Refusal> {
        let is_named = mask.contains(McMemberMask::MGID) && wanted.mgid != [0; 16];
        let known = self
            .all
            .iter()
            .position(|g| is_named && g.record.mgid == wanted.mgid);
        let member = |group: &Group| group.members.iter().position(|m| m.gid == from);
        if is_named && wanted.mgid().ip().is_ipv4() != from.ip().is_ipv4() {
            return Err(SaStatus::ReqInvalid.into());
        }
        let is_member = known.is_some_and(|at| member(&self.all[at]).is_some());
        let (all, each) = self.limits;
        if !is_member && (self.members() >= all || self.memberships(from) >= each) {
            return Err(SaStatus::NoResources.into());
        }
        let (at, event) = match known {
            Some(at) if !fits(&self.all[at].record, mask, wanted) => {
                return Err(SaStatus::ReqInvalid.into());
            }
            Some(at) => (at, None),
            None => {
                let mgid = is_named.then(|| wanted.mgid());
                self.create(from, mgid, mask, wanted, mtu)?;
                let at = self.all.len() - 1;
                (at, Some((Trap::GroupCreated, self.all[at].record.mgid())))
            }
        };
        let group = &mut self.all[at];
        let state = wanted.join_state();
        let at = member(group).unwrap_or_else(|| {
            group.members.push(Member {
                gid: from,
                join_state: 0,
            });
            group.members.len() - 1
        });
        group.members[at].join_state |= state;
        Ok((group.record_for(from, group.members[at].join_state), event))
    }

    fn create(
        &mut self,
        from: Gid,
        mgid: Option<Gid>,
        mask: McMemberMask,
        wanted: &McMemberRecord,
        mtu: Mtu,
    ) -> Result<(), Refusal> {
        if wanted.join_state() & FULL == 0 || !mask.intersects(McMemberMask::CREATE) {
            return Err(SaStatus::ReqInvalid.into());
        }
        if !mask.contains(McMemberMask::CREATE) {
            return Err(SaStatus::InsufficientComponents.into());
        }
        if self.all.len() >= self.most {
            return Err(SaStatus::NoResources.into());
        }
        let mgid = mgid.unwrap_or_else(|| self.free_gid(from));
        let ours = [
            (
                McMemberMask::MTU,
                McMemberMask::MTU_SELECTOR,
                wanted.mtu,
                mtu.code(),
            ),
            (
                McMemberMask::RATE,
                McMemberMask::RATE_SELECTOR,
                wanted.rate,
                RATE,
            ),
        ];
        let mut limits = ours.map(|(bit, selector, wanted, most)| match mask.contains(bit) {
            true => choose(mask.contains(selector), wanted, most),
            false => Some(most),
        });
        // A UDP socket has no rate limit, so any rate is accepted.
        limits[0] = limits[0].filter(|code| *code <= mtu.code());
        let pkey = wanted.pkey.get() & 0x7fff;
        let (Some(mtu), Some(rate), 0x7fff, true) =
            (limits[0].take(), limits[1].take(), pkey, is_group(mgid))
        else {
            return Err(SaStatus::ReqInvalid.into());
        };
        let exactly = |code| Limit::new(Selector::Exactly, code);
        let life_time = match mask.contains(McMemberMask::PACKET_LIFE_TIME) {
            true => wanted.packet_life_time.code(),
            false => LIFE_TIME,
        };
        let hops = match mask.contains(McMemberMask::HOP_LIMIT) {
            true => wanted.hop_limit(),
            false => HOP_LIMIT,
        };
        let scope = match mgid.ip() {
            std::net::IpAddr::V6(_) => mgid.0[1] & 0xf,
            std::net::IpAddr::V4(_) => wanted.scope(),
        };
        let mlid = mask.contains(McMemberMask::MLID).then(|| wanted.mlid.get());
        let record = McMemberRecord {
            mgid: mgid.0,
            port_gid: [0; 16],
            mlid: U16::new(self.free_mlid(mlid)),
            mtu: exactly(mtu),
            rate: exactly(rate),
            packet_life_time: exactly(life_time),
            proxy_join: 0,
            reserved: [0; 2],
            ..*wanted
        };
        let record = record.with_route(wanted.sl(), wanted.flow_label(), hops);
        self.all.push(Group {
            record: record.with_state(scope, 0),
            members: Vec::new(),
        });
        Ok(())
    }

    /// Returns an unused multicast GID of the host's address family, with site-local scope for IPv6
    /// or organization-local scope for IPv4 (RFC 2365).
    fn free_gid(&mut self, host: Gid) -> Gid {
        loop {
            let [high, low] = self.next.to_be_bytes();
            self.next = self.next.wrapping_add(1).max(1);
            let addr = match host.ip() {
                std::net::IpAddr::V4(_) => std::net::IpAddr::from([239, 192, high, low]),
                std::net::IpAddr::V6(_) => {
                    let number = u16::from_be_bytes([high, low]);
                    std::net::IpAddr::from([0xff15, 0xa01c, 0, 0, 0, 0, 0, number])
                }
            };
            if self.find(addr.into()).is_none() {
                return addr.into();
            }
        }
    }

    /// Returns an unused multicast LID, preferably the requested one. There are always fewer groups
    /// than LIDs.
    fn free_mlid(&self, wished: Option<u16>) -> u16 {
        const MLIDS: std::ops::Range<u16> = FIRST_MLID..0xfffe;
        let is_taken = |lid: u16| self.all.iter().any(|group| group.record.mlid.get() == lid);
        let wished = wished.filter(|lid| MLIDS.contains(lid));
        let mut all = wished.into_iter().chain(MLIDS);
        all.find(|lid| !is_taken(*lid)).unwrap_or(FIRST_MLID)
    }

    fn leave(
        &mut self,
        from: Gid,
        wanted: &McMemberRecord,
    ) -> Result<(McMemberRecord, Event), Refusal> {
        let at = self
            .all
            .iter()
            .position(|group| group.record.mgid == wanted.mgid);
        let at = at.ok_or(SaStatus::ReqInvalid)?;
        let group = &mut self.all[at];
        let member = group.members.iter().position(|member| member.gid == from);
        let member = member.ok_or(SaStatus::ReqInvalid)?;
        let state = &mut group.members[member].join_state;
        if *state & wanted.join_state() != wanted.join_state() {
            return Err(SaStatus::ReqInvalid.into());
        }
        *state &= !wanted.join_state();
        let left = *state;
        if left == 0 {
            group.members.swap_remove(member);
        }
        let deleted = group.record_for(from, left);
        if group.is_alive() {
            return Ok((deleted, None));
        }
        let mgid = self.all.swap_remove(at).record.mgid();
        Ok((deleted, Some((Trap::GroupDeleted, mgid))))
    }
}

/// Selects the code of a group attribute: the requested value, limited to the maximum.
fn choose(has_selector: bool, wanted: Limit, most: u8) -> Option<u8> {
    let code = match wanted.selector() {
        Selector::Exactly => wanted.code(),
        _ if !has_selector => wanted.code(),
        Selector::Less => wanted.code().saturating_sub(1).min(most),
        Selector::Greater | Selector::Best => most,
    };
    let is_given = code != 0 && wanted.admits(has_selector, code);
    is_given.then_some(code)
}

fn is_group(mgid: Gid) -> bool {
    mgid.ip().is_multicast()
}

/// Returns whether a group has the requested attributes.
fn fits(group: &McMemberRecord, mask: McMemberMask, wanted: &McMemberRecord) -> bool {
    let fields = [
        (McMemberMask::MGID, wanted.mgid == group.mgid),
        (McMemberMask::QKEY, wanted.qkey == group.qkey),
        (McMemberMask::MLID, wanted.mlid == group.mlid),
        (
            McMemberMask::TRAFFIC_CLASS,
            wanted.traffic_class == group.traffic_class,
        ),
        (
            McMemberMask::PKEY,
            (wanted.pkey.get() ^ group.pkey.get()) & 0x7fff == 0,
        ),
        (McMemberMask::SL, wanted.sl() == group.sl()),
        (
            McMemberMask::FLOW_LABEL,
            wanted.flow_label() == group.flow_label(),
        ),
        (
            McMemberMask::HOP_LIMIT,
            wanted.hop_limit() == group.hop_limit(),
        ),
        (McMemberMask::SCOPE, wanted.scope() == group.scope()),
    ];
    let limits = [
        (
            McMemberMask::MTU,
            McMemberMask::MTU_SELECTOR,
            wanted.mtu,
            group.mtu,
        ),
        (
            McMemberMask::RATE,
            McMemberMask::RATE_SELECTOR,
            wanted.rate,
            group.rate,
        ),
        (
            McMemberMask::PACKET_LIFE_TIME,
            McMemberMask::PACKET_LIFE_TIME_SELECTOR,
            wanted.packet_life_time,
            group.packet_life_time,
        ),
    ];
    all_match(mask, &fields)
        && limits.iter().all(|(bit, selector, wanted, has)| {
            !mask.contains(*bit) || wanted.admits(mask.contains(*selector), has.code())
        })
}

/// Checks that a host only changes its own membership, and returns that membership.
fn own(from: Gid, mask: McMemberMask, given: &McMemberRecord) -> Result<McMemberRecord, Refusal> {
    if !mask.contains(McMemberMask::JOIN_STATE) {
        return Err(SaStatus::InsufficientComponents.into());
    }
    if given.join_state() == 0 {
        return Err(SaStatus::ReqInvalid.into());
    }
    let mut record = *given;
    if !mask.contains(McMemberMask::PORT_GID) {
        record.port_gid = from.0;
    }
    if record.port_gid() != from {
        return Err(SaStatus::InvalidGid.into());
    }
    Ok(record)
}
