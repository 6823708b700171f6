//! Paths between addresses. On RoCE the IP network routes packets, so a path can be computed from
//! the two GIDs.

use riser_transport::verbs::{Gid, Mtu, PKey};
use zerocopy::big_endian::{U16, U32};

use super::super::wire::path::{PathMask, PathRecord, REVERSIBLE};
use super::super::wire::{Limit, Selector};
use super::groups::Groups;
use super::{HOP_LIMIT, LIFE_TIME, RATE};

/// Computes the path from a port to another port or to a group. Returns `None` if the addresses
/// have different families or the destination is not a host address.
pub(super) fn compute(mtu: Mtu, groups: &Groups, sgid: Gid, dgid: Gid) -> Option<PathRecord> {
    let (source, destination) = (sgid.ip(), dgid.ip());
    let is_host = |ip: std::net::IpAddr| {
        let is_broadcast = matches!(ip, std::net::IpAddr::V4(v4) if v4.is_broadcast());
        !ip.is_unspecified() && !ip.is_multicast() && !is_broadcast
    };
    if !is_host(source) || source.is_ipv4() != destination.is_ipv4() {
        return None;
    }
    let exactly = |code| Limit::new(Selector::Exactly, code);
    let path = PathRecord {
        dgid: dgid.0,
        sgid: sgid.0,
        flow_label_and_hop_limit: U32::new(u32::from(HOP_LIMIT)),
        reversible_and_count: REVERSIBLE,
        pkey: U16::new(PKey::DEFAULT.0),
        mtu: exactly(mtu.code()),
        rate: exactly(RATE),
        packet_life_time: exactly(LIFE_TIME),
        ..PathRecord::default()
    };
    if is_host(destination) {
        return Some(path);
    }
    let group = groups.find(dgid)?;
    Some(PathRecord {
        dlid: group.mlid,
        flow_label_and_hop_limit: U32::new(group.flow_label() << 8 | u32::from(group.hop_limit())),
        traffic_class: group.traffic_class,
        // Multicast paths are not reversible.
        reversible_and_count: 0,
        pkey: group.pkey,
        qos_class_and_sl: U16::new(u16::from(group.sl())),
        mtu: group.mtu,
        rate: group.rate,
        packet_life_time: group.packet_life_time,
        ..path
    })
}

/// Applies the attributes that a request may choose on RoCE: service, flow label, traffic class and
/// priority. Returns `None` if a requested attribute is not available.
pub(super) fn fit(mut path: PathRecord, mask: PathMask, wanted: &PathRecord) -> Option<PathRecord> {
    let is_group = path.dgid().ip().is_multicast();
    let limits = [
        (PathMask::MTU, PathMask::MTU_SELECTOR, wanted.mtu, path.mtu),
        (
            PathMask::RATE,
            PathMask::RATE_SELECTOR,
            wanted.rate,
            path.rate,
        ),
        (
            PathMask::PACKET_LIFE_TIME,
            PathMask::PACKET_LIFE_TIME_SELECTOR,
            wanted.packet_life_time,
            path.packet_life_time,
        ),
    ];
    let admitted = limits.iter().all(|(bit, selector, wanted, has)| {
        !mask.contains(*bit) || wanted.admits(mask.contains(*selector), has.code())
    });
    let fields = [
        // Programs written for InfiniBand may specify LIDs, which are ignored if GIDs are present.
        (
            PathMask::DLID,
            mask.contains(PathMask::DGID) || wanted.dlid == path.dlid,
        ),
        (
            PathMask::SLID,
            mask.contains(PathMask::SGID) || wanted.slid == path.slid,
        ),
        // A partition key matches with either membership bit.
        (
            PathMask::PKEY,
            (wanted.pkey.get() ^ path.pkey.get()) & 0x7fff == 0,
        ),
        (
            PathMask::REVERSIBLE,
            !wanted.is_reversible() || path.is_reversible(),
        ),
        // Bit 31 selects packets of another transport.
        (
            PathMask::RAW_TRAFFIC,
            wanted.flow_label_and_hop_limit.get() >> 31 == 0,
        ),
        (PathMask::PREFERENCE, wanted.preference == path.preference),
    ];
    if !admitted
        || fields
            .iter()
            .any(|(bit, same)| mask.contains(*bit) && !same)
    {
        return None;
    }
    if mask.contains(PathMask::SERVICE_ID) {
        path.service_id = wanted.service_id;
    }
    if mask.contains(PathMask::PKEY) {
        path.pkey = wanted.pkey;
    }
    if is_group {
        return Some(path);
    }
    if mask.contains(PathMask::TRAFFIC_CLASS) {
        path.traffic_class = wanted.traffic_class;
    }
    if mask.contains(PathMask::FLOW_LABEL) {
        let word = wanted.flow_label() << 8 | u32::from(path.hop_limit());
        path.flow_label_and_hop_limit = U32::new(word);
    }
    let (mut class, mut sl) = (path.qos_class(), path.sl());
    if mask.contains(PathMask::QOS_CLASS) {
        class = wanted.qos_class();
    }
    if mask.contains(PathMask::SL) {
        sl = wanted.sl();
    }
    path.qos_class_and_sl = U16::new(class << 4 | u16::from(sl));
    Some(path)
}
