use std::collections::HashMap;
use std::net::IpAddr;

use zerocopy::{FromZeros, IntoBytes};

use super::*;
use crate::vnic::vema::{BUSY, Vema, VemaConfig};
use crate::vnic::wire::attr::{MAX_MAC_ENTRIES, link};
use crate::vnic::{QpAddress, port};

fn address(n: u8, qpn: u32) -> QpAddress {
    QpAddress {
        gid: Gid::from(IpAddr::from([10, 0, 0, n])),
        qpn,
    }
}

/// Returns an address in another network with the same ending as that of host `n`.
fn alike(network: u8, n: u8) -> QpAddress {
    let gid = Gid::from(IpAddr::from([network, 128, 0, n]));
    QpAddress { gid, qpn: 10 }
}

fn config(vesws: &[u16]) -> ManagerConfig {
    ManagerConfig {
        address: address(1, 5),
        max_mad: 1024,
        vesws: vesws.iter().map(|id| VeswConfig::new(*id, 1500)).collect(),
        interval: Duration::from_secs(1),
        dead_after: Duration::from_secs(4),
        first_tid: 1000,
    }
}

fn vema(n: u8, max_vports: u8) -> Vema {
    Vema::new(VemaConfig {
        qpn: 100 + u32::from(n),
        mtu: 1024,
        max_vports,
        manager: None,
    })
}

/// A network of hosts with a manager. Datagrams arrive immediately unless they are lost.
struct Net {
    now: Instant,
    manager: EthernetManager,
    hosts: Vec<(QpAddress, Vema)>,
    /// Every `loss`-th datagram is lost; 0 disables loss.
    loss: usize,
    sent: usize,
    /// Number of requests to each host.
    queries: HashMap<QpAddress, usize>,
}

impl Net {
    fn new(vesws: &[u16]) -> Self {
        Self {
            now: Instant::now(),
            manager: EthernetManager::new(config(vesws)),
            hosts: Vec::new(),
            loss: 0,
            sent: 0,
            queries: HashMap::new(),
        }
    }

    fn join(&mut self, n: u8, qpn: u32) {
        self.join_with(n, qpn, 2);
    }

    fn join_with(&mut self, n: u8, qpn: u32, max_vports: u8) {
        self.hosts.push((address(n, qpn), vema(n, max_vports)));
    }

    /// Replaces the manager by another process.
    fn restart_manager(&mut self) {
        self.manager = EthernetManager::new(ManagerConfig {
            address: address(1, 6),
            first_tid: 5_000_000,
            ..self.manager.config.clone()
        });
    }

    fn is_lost(&mut self) -> bool {
        self.sent += 1;
        self.loss != 0 && self.sent.is_multiple_of(self.loss)
    }

    /// Simulates a period of time.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            while let Some((to, mad)) = self.manager.poll_transmit(self.now) {
                if let MadDestination::Member(to) = to {
                    *self.queries.entry(to).or_default() += 1;
                }
                for index in 0..self.hosts.len() {
                    let address = self.hosts[index].0;
                    let is_for = match to {
                        MadDestination::Group => true,
                        MadDestination::Member(to) => to == address,
                    };
                    if !is_for || self.is_lost() {
                        continue;
                    }
                    let from = self.manager.config.address;
                    let response = self.hosts[index].1.handle_mad(from, &mad, self.now);
                    if let Some(response) = response.filter(|_| !self.is_lost()) {
                        self.manager.handle_mad(address, &response, self.now);
                    }
                }
            }
            for index in 0..self.hosts.len() {
                while let Some((to, mad)) = self.hosts[index].1.poll_trap(self.now) {
                    assert_eq!(to, self.manager.config.address);
                    if !self.is_lost() {
                        let from = self.hosts[index].0;
                        self.manager.handle_mad(from, &mad, self.now);
                    }
                }
            }
            let next = self
                .manager
                .deadline()
                .unwrap()
                .max(self.now + Duration::from_millis(1));
            if next > end {
                self.now = end;
                return;
            }
            self.now = next;
        }
    }

    fn port(&self, host: usize) -> &port::VirtualPort {
        self.hosts[host].1.port(0).unwrap()
    }

    /// Adds a host that reports a LID assigned by another manager.
    fn join_with_lid(&mut self, at: QpAddress, lid: Lid) {
        let mut host = vema(9, 2);
        let info = self.manager.config.vesws[0].port(lid);
        let order = VemaHeader::new(method::SET, id::VESWPORT_INFO, 0, 1).with(info.as_bytes());
        let from = self.manager.config.address;
        assert!(host.handle_mad(from, &order, self.now).is_some());
        assert_eq!(host.lid(0), Some(lid));
        self.hosts.push((at, host));
    }

    /// Returns the LIDs of hosts by their addresses.
    fn lids_of_hosts(&self) -> HashMap<Gid, Lid> {
        let lid = |(at, vema): &(QpAddress, Vema)| (at.gid, vema.lid(0).unwrap());
        self.hosts.iter().map(lid).collect()
    }

    fn lids(&self, host: usize) -> Vec<u32> {
        let paths = self.port(host).paths();
        paths.iter().map(|path| path.dlid.get()).collect()
    }

    fn is_complete(&self) -> bool {
        self.manager.members().count() == self.hosts.len()
            && self.manager.members().all(|member| member.is_complete)
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn members_are_found_configured_and_connected() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.join(2, 20);
    net.run(FIRST_SEARCH + Duration::from_millis(110));
    assert!(
        net.is_complete(),
        "{:?}",
        net.manager.members().collect::<Vec<_>>()
    );
    for host in 0..2 {
        let info = net.port(host).info();
        assert_eq!(info.vesw.vesw_id.get(), 100);
        assert_eq!(info.vport.oper_state, state::FORWARDING);
        assert_eq!(info.vport.encap_slid.get(), host as u32 + 1);
        assert_eq!(net.lids(host), [1, 2]);
        assert_eq!(net.port(host).mac_table().len(), 2);
        let other = Lid(2 - host as u32);
        assert_eq!(
            net.port(host).mac_table().dlid(Mac::of_lid(other)),
            Some(other)
        );
    }
    assert_eq!(net.port(0).paths()[1].qpn.get(), 102);
    assert_eq!(net.port(0).paths()[1].gid, address(2, 0).gid.0);
}

#[test]
fn late_member_is_found_within_interval() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.join(2, 20);
    net.run(SECOND * 10);
    net.join(3, 30);
    net.run(SECOND + Duration::from_millis(110));
    assert!(net.is_complete());
    assert_eq!(net.lids(0), [1, 2, 3]);
    assert_eq!(net.port(0).mac_table().len(), 3);
}

#[test]
fn returning_member_regains_free_lid() {
    let mut net = Net::new(&[100]);
    for n in 1..=3 {
        net.join(n, 10);
    }
    net.run(SECOND * 2);
    let (_, dead) = net.hosts.remove(1);
    net.run(SECOND * 3);
    assert_eq!(net.lids(0), [1, 2, 3], "not yet");
    net.run(SECOND * 2);
    assert_eq!(net.lids(0), [1, 3]);
    assert_eq!(net.port(0).mac_table().dlid(Mac::of_lid(Lid(2))), None);
    net.hosts.push((address(2, 10), dead.clone()));
    net.run(SECOND * 2);
    assert!(net.is_complete());
    assert_eq!(net.lids(2), [1, 2, 3]);
    assert_eq!(net.hosts[2].1.lid(0), Some(Lid(2)));
    // Repeat this, but in the meantime the LID is assigned to a host whose address has the same
    // ending.
    net.hosts.pop();
    net.run(SECOND * 5);
    net.hosts.push((alike(10, 2), vema(9, 2)));
    net.run(SECOND * 2);
    net.hosts.push((address(2, 10), dead));
    net.run(SECOND * 2);
    assert!(net.is_complete());
    assert_eq!(net.hosts[2].1.lid(0), Some(Lid(2)));
    let lid = net.hosts[3].1.lid(0).unwrap();
    assert!(lid >= FIRST_SPARE && !lid.is_multicast());
    assert_eq!(net.lids(3), [1, 2, 3, lid.0]);
}

#[test]
fn absent_member_keeps_its_lid() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.join(2, 10);
    net.run(SECOND * 2);
    net.hosts.pop();
    net.run(SECOND * 5);
    assert_eq!(net.lids(0), [1]);
    net.join_with_lid(address(3, 10), Lid(2));
    net.run(SECOND * 2);
    assert_eq!(net.lids(0), [1, 3]);
    // The member has restarted.
    net.join(2, 11);
    net.run(SECOND * 2);
    assert!(net.is_complete());
    assert_eq!(net.hosts[2].1.lid(0), Some(Lid(2)));
    let path = net.port(0).paths()[1];
    assert_eq!((path.dlid.get(), path.gid), (2, address(2, 0).gid.0));
}

#[test]
fn active_member_keeps_lid_on_joins() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.hosts.push((alike(10, 1), vema(9, 2)));
    net.run(SECOND * 2);
    let before = net.lids_of_hosts();
    // One host reports the LID derived from its address, the other hosts report LIDs of members.
    net.join_with_lid(address(2, 10), Lid(2));
    net.join_with_lid(address(3, 10), before[&alike(10, 1).gid]);
    net.join_with_lid(alike(11, 1), Lid(1));
    net.run(SECOND * 2);
    assert!(net.is_complete());
    let after = net.lids_of_hosts();
    assert!(before.iter().all(|(gid, lid)| after[gid] == *lid));
    assert_eq!(after[&address(2, 0).gid], Lid(2));
    assert_eq!(after[&address(3, 0).gid], Lid(3));
    let different: BTreeSet<_> = after.values().collect();
    assert_eq!(different.len(), net.hosts.len());
}

#[test]
fn maximum_members_may_share_address_ending() {
    let mut net = Net::new(&[100]);
    for n in 0..MAX_MEMBERS as u8 {
        // All 23 bits are equal.
        let gid = Gid::from(IpAddr::from([1 + n / 2, n << 7, 0, 1]));
        net.hosts.push((QpAddress { gid, qpn: 10 }, vema(9, 2)));
    }
    net.run(SECOND * 5);
    assert!(net.is_complete());
    let before = net.lids_of_hosts();
    let different: BTreeSet<_> = before.values().collect();
    assert_eq!(different.len(), MAX_MEMBERS);
    let is_spare = |lid: &&Lid| **lid >= FIRST_SPARE && !lid.is_multicast();
    assert_eq!(before.values().filter(is_spare).count(), MAX_MEMBERS - 1);
    // The hosts respond in a different order.
    net.hosts.reverse();
    net.restart_manager();
    net.run(SECOND * 5);
    assert!(net.is_complete());
    assert_eq!(net.lids_of_hosts(), before);
}

#[test]
fn colliding_members_get_different_lids() {
    let gid = |n: u64| Gid::from(IpAddr::from((n << 32 | 1).to_be_bytes().map(u16::from)));
    let mut seen = HashMap::new();
    let (first, second) = (0..)
        .find_map(|n| {
            let spare = lids_of(gid(n)).nth(1);
            seen.insert(spare, n).map(|before| (gid(before), gid(n)))
        })
        .unwrap();
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    for gid in [first, second] {
        net.hosts.push((QpAddress { gid, qpn: 10 }, vema(9, 2)));
    }
    net.run(SECOND * 2);
    assert!(net.is_complete());
    let lids = net.lids_of_hosts();
    let spare = lids_of(first).nth(1).unwrap();
    assert_eq!((lids[&address(1, 0).gid], lids[&first]), (Lid(1), spare));
    assert_eq!(Some(lids[&second]), lids_of(second).nth(2));
}

#[test]
fn restarted_member_keeps_lid_and_tables() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.join(2, 20);
    net.run(SECOND * 2);
    net.hosts.remove(0);
    net.join(1, 11);
    net.run(SECOND * 2);
    assert!(net.is_complete());
    assert_eq!(net.hosts[1].1.lid(0), Some(Lid(1)));
    assert_eq!(net.lids(1), [1, 2]);
}

#[test]
fn restarted_manager_keeps_member_state() {
    let mut net = Net::new(&[100]);
    for n in [3, 1, 2] {
        net.join(n, 10);
    }
    net.run(SECOND * 2);
    // Entries of the previous table must be removed.
    net.hosts[0]
        .1
        .port_mut(0)
        .unwrap()
        .set_macs(&[Mac([2; 6])], &[]);
    net.run(SECOND * 2);
    assert_eq!(net.port(1).mac_table().len(), 4);
    let lids: Vec<_> = net.hosts.iter().map(|(_, vema)| vema.lid(0)).collect();
    net.hosts[0].1.port_mut(0).unwrap().set_macs(&[], &[]);
    net.hosts.rotate_left(1);
    net.restart_manager();
    for _ in 0..3 {
        net.run(SECOND);
        let info = net.port(0).info();
        assert_eq!(info.vport.oper_state, state::FORWARDING);
    }
    net.hosts.rotate_right(1);
    assert!(net.is_complete());
    let after: Vec<_> = net.hosts.iter().map(|(_, vema)| vema.lid(0)).collect();
    assert_eq!(after, lids);
    assert_eq!(net.port(1).mac_table().len(), 3);
}

#[test]
fn simultaneous_restart_keeps_lids_in_any_order() {
    const HOSTS: usize = 4;
    let orders = (0..HOSTS.pow(3)).map(|n| [n % HOSTS, n / HOSTS % HOSTS, n / HOSTS / HOSTS]);
    for (order, restarted) in orders.flat_map(|order| (0..HOSTS).map(move |host| (order, host))) {
        let mut net = Net::new(&[100]);
        for n in 1..4 {
            net.join(n, 10);
        }
        // The address has the same ending as that of the first host.
        net.hosts.push((alike(10, 1), vema(9, 2)));
        // The first hosts found have the lowest LIDs if the manager assigns them by counting.
        net.hosts.rotate_left(restarted);
        net.run(SECOND * 3);
        let before = net.lids_of_hosts();

        // The host that has lost its LID responds before, between or after the other hosts.
        net.hosts[restarted].0.qpn = 11;
        net.hosts[restarted].1 = vema(8, 2);
        for (place, other) in order.into_iter().enumerate() {
            net.hosts.swap(place, other);
        }
        net.restart_manager();
        net.run(SECOND * 3);
        assert!(net.is_complete());
        assert_eq!(net.lids_of_hosts(), before, "{order:?} {restarted}");
        let different: BTreeSet<_> = before.values().collect();
        assert_eq!(different.len(), HOSTS);
    }
}

#[test]
fn manager_restart_does_not_reassign_lids() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.join(2, 10);
    net.run(SECOND * 2);
    assert_eq!(net.hosts[1].1.lid(0), Some(Lid(2)));
    // This host reports the same state as the second one, and is found first.
    let lies = net.hosts[1].1.clone();
    net.hosts.insert(0, (address(3, 10), lies));
    net.restart_manager();
    net.run(SECOND * 3);
    assert_eq!(net.hosts[2].1.lid(0), Some(Lid(2)));
    assert_eq!(net.hosts[0].1.lid(0), Some(Lid(3)));
    assert!(net.is_complete());
}

#[test]
fn member_absent_during_restart_keeps_lid() {
    let mut net = Net::new(&[100]);
    for n in 1..=3 {
        net.join(n, 10);
    }
    net.run(SECOND * 2);
    let away = net.hosts.remove(1);
    net.restart_manager();
    net.join(4, 10);
    net.run(SECOND * 20);
    assert_eq!(net.lids(0), [1, 3, 4]);
    net.hosts.push(away);
    net.run(SECOND * 2);
    assert!(net.is_complete());
    assert_eq!(net.lids(0), [1, 2, 3, 4]);
    assert_eq!(net.hosts[3].1.lid(0), Some(Lid(2)));
}

#[test]
fn interface_addresses_are_distributed_promptly() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.join(2, 20);
    net.run(SECOND * 3);
    let mac = |n: u8| Mac([0x06, 0, 0, 0, 0, n]);
    let macs: Vec<_> = (0..255).map(mac).collect();
    net.hosts[0].1.port_mut(0).unwrap().set_macs(&macs, &[]);
    net.hosts[0].1.port_mut(0).unwrap().set_link(true);
    // A trap reports the change, so it does not take a full interval.
    net.run(Duration::from_millis(200));
    assert_eq!(net.port(1).mac_table().len(), 257);
    assert_eq!(net.port(1).mac_table().dlid(mac(254)), Some(Lid(1)));
    assert_eq!(
        net.port(1).mac_table().digest(),
        net.port(0).mac_table().digest()
    );
    // The second host claims some of them as well, but the first host keeps them.
    net.hosts[1]
        .1
        .port_mut(0)
        .unwrap()
        .set_macs(&macs[..10], &[]);
    net.run(SECOND);
    assert_eq!(net.port(0).mac_table().dlid(mac(3)), Some(Lid(1)));
    net.hosts[0]
        .1
        .port_mut(0)
        .unwrap()
        .set_macs(&macs[..2], &[]);
    net.run(SECOND * 2);
    assert_eq!(net.port(1).mac_table().len(), 2 + 2 + 8);
    assert_eq!(net.port(1).mac_table().dlid(mac(3)), Some(Lid(2)));
    assert_eq!(net.port(1).mac_table().dlid(mac(200)), None);
    assert!(net.is_complete());
}

#[test]
fn member_with_fewer_ports_joins_first_switches() {
    let mut net = Net::new(&[100, 200]);
    net.join(1, 10);
    net.join_with(2, 20, 1);
    net.join(3, 30);
    net.run(SECOND * 5);
    assert!(net.is_complete());
    assert_eq!(net.lids(0), [1, 2, 3]);
    assert!(net.hosts[1].1.port(1).is_none());
    let other = net.hosts[0].1.port(1).unwrap();
    let lids: Vec<_> = other.paths().iter().map(|p| p.dlid.get()).collect();
    assert_eq!((lids, other.mac_table().len()), (vec![1, 3], 2));
    // A member that restarts with more ports joins the second switch.
    net.hosts.remove(1);
    net.join_with(2, 21, 2);
    net.run(SECOND * 5);
    assert!(net.is_complete());
    assert_eq!(net.hosts[0].1.port(1).unwrap().paths().len(), 3);
}

#[test]
fn member_cannot_claim_used_addresses() {
    let mut net = Net::new(&[100]);
    for n in 1..=3 {
        net.join(n, 10);
    }
    net.run(SECOND * 2);
    let chosen = Mac([0x06, 0, 0, 0, 0, 7]);
    net.hosts[2].1.port_mut(0).unwrap().set_macs(&[chosen], &[]);
    net.run(SECOND * 2);
    // The first host claims addresses of the other hosts, and the address of a later host.
    let wanted: Vec<_> = (2..=4).map(|n| Mac::of_lid(Lid(n))).collect();
    let claims = [&[chosen], &wanted[..]].concat();
    net.hosts[0].1.port_mut(0).unwrap().set_macs(&claims, &[]);
    net.run(SECOND * 2);
    net.join(4, 10);
    net.run(SECOND * 2);
    let table = net.port(1).mac_table();
    for lid in (1..=4).map(Lid) {
        assert_eq!(table.dlid(Mac::of_lid(lid)), Some(lid));
    }
    assert_eq!(table.dlid(chosen), Some(Lid(3)));
    assert_eq!(table.len(), 5);
}

#[test]
fn full_mac_table_keeps_port_addresses() {
    let mut net = Net::new(&[100]);
    for n in 1..=10 {
        net.join(n, 10);
    }
    net.run(SECOND * 2);
    for host in 0..9 {
        let macs: Vec<_> = (0..=255).map(|n| Mac([6, host, 0, 0, 0, n])).collect();
        let port = net.hosts[usize::from(host)].1.port_mut(0).unwrap();
        port.set_macs(&macs, &[]);
    }
    net.run(SECOND * 3);
    let table = net.port(0).mac_table();
    assert_eq!(table.len(), usize::from(MAX_MAC_ENTRIES));
    for lid in (1..=10).map(Lid) {
        assert_eq!(table.dlid(Mac::of_lid(lid)), Some(lid));
    }
}

#[test]
fn constantly_changing_member_is_rate_limited() {
    let mut net = Net::new(&[100]);
    for n in 1..=20 {
        net.join(n, 10);
    }
    net.run(SECOND * 5);
    let (member, agent) = (net.hosts[0].0, 10);
    assert_eq!(member, address(1, agent));
    net.queries.clear();
    for n in 0..1000_u32 {
        let [_, a, b, c] = n.to_be_bytes();
        let port = net.hosts[0].1.port_mut(0).unwrap();
        port.set_macs(&[Mac([6, 0, 0, a, b, c])], &[]);
        let trap = VemaHeader::new(method::TRAP, id::NOTICE, 0, 1).with(&[0; 100]);
        net.manager.handle_mad(member, &trap, net.now);
        net.run(Duration::from_millis(10));
    }
    // Ten queries, and about as many tables.
    let queries = net.queries[&address(9, agent)];
    assert!((20..50).contains(&queries), "{queries}");
    // All members are complete soon afterwards.
    net.run(SECOND * 2);
    assert!(net.is_complete());
}

#[test]
fn unconfigurable_member_is_queried_at_limited_rate() {
    let mut net = Net::new(&[100]);
    net.manager.admits = Some(net.now);
    let liar = address(7, 70);
    // This member responds immediately, but never applies the configuration.
    let queries = (0..100_000).take_while(|_| {
        let Some((to, mad)) = net.manager.poll_transmit(net.now) else {
            return false;
        };
        let (header, _) = VemaHeader::parse(&mad).unwrap();
        let data = match header.attr_id.get() {
            id::END_POINT => vec![0, 0, 0, 7, 4, 0, 0, 0],
            id::VESWPORT_INFO => VeswPortInfo::power_on().as_bytes().to_vec(),
            _ => vec![0; 100],
        };
        net.manager
            .handle_mad(liar, &header.to_response(0).with(&data), net.now);
        to == MadDestination::Group || to == MadDestination::Member(liar)
    });
    let queries = queries.count();
    assert!((5..1000).contains(&queries), "{queries}");
    // Other members are not delayed, and the manager eventually waits.
    net.join(1, 10);
    net.run(SECOND * 2);
    assert!(net.manager.members().any(|member| member.is_complete));
    assert!(net.manager.deadline().unwrap() > net.now);
}

#[test]
fn lost_datagrams_are_repeated() {
    let mut net = Net::new(&[100, 200]);
    net.loss = 3;
    for n in 1..=10 {
        net.join(n, 10);
    }
    net.run(SECOND * 40);
    net.loss = 0;
    net.run(SECOND * 3);
    assert!(net.is_complete());
    for (_, vema) in &net.hosts {
        for vport in 0..2 {
            let port = vema.port(vport).unwrap();
            assert_eq!((port.paths().len(), port.mac_table().len()), (10, 10));
            assert_eq!(port.info().vesw.vesw_id.get(), 100 + 100 * u16::from(vport));
        }
    }
}

#[test]
fn refusing_member_stalls_no_other() {
    let mut net = Net::new(&[100]);
    for n in 0..=254 {
        net.join(n, 10);
    }
    // The first host belongs to another manager.
    let other = address(250, 99);
    let info = ClassPortInfo {
        trap_gid: other.gid.0,
        trap_lid: 1.into(),
        ..FromZeros::new_zeroed()
    };
    let claim = VemaHeader::new(method::SET, id::CLASS_PORT_INFO, 0, 1).with(info.as_bytes());
    let response = net.hosts[0].1.handle_mad(other, &claim, net.now).unwrap();
    assert_eq!(VemaHeader::parse(&response).unwrap().0.status.get(), 0);
    net.run(FIRST_SEARCH + SECOND);
    let members: Vec<_> = net.manager.members().collect();
    assert_eq!(members.len(), MAX_MEMBERS);
    assert!(members[1..].iter().all(|member| member.is_complete));
    assert!(!members[0].is_complete);
    assert_eq!(members[0].other_manager, Some(other.gid));
    assert!(members[1..].iter().all(|m| m.other_manager.is_none()));
    assert_eq!(net.lids(1).len(), MAX_MEMBERS - 1);
    let again = net.hosts[0]
        .1
        .handle_mad(address(1, 5), &claim, net.now)
        .unwrap();
    assert_eq!(VemaHeader::parse(&again).unwrap().0.status.get(), BUSY);
}

#[test]
fn successor_manager_does_not_warn() {
    let mut net = Net::new(&[100]);
    for n in 1..=5 {
        net.join(n, 10);
    }
    net.run(SECOND * 3);
    net.restart_manager();
    net.manager.config.address = address(9, 6);
    for _ in 0..20 {
        net.run(SECOND);
        assert_eq!(net.manager.warned, None);
    }
    assert!(net.is_complete());

    // A manager that remains active causes a warning, once for all members.
    net.manager = EthernetManager::new(config(&[100]));
    for _ in 0..20 {
        let now = net.now;
        for (_, vema) in &mut net.hosts {
            let get = VemaHeader::new(method::GET, id::END_POINT, 0, 1).with(&[]);
            vema.handle_mad(address(9, 6), &get, now).unwrap();
        }
        net.run(SECOND);
    }
    assert_eq!(net.manager.warned, Some(address(9, 0).gid));
}

#[test]
fn member_with_many_ports_is_configured_promptly() {
    let vesws: Vec<_> = (1..=16).collect();
    let mut net = Net::new(&vesws);
    // Datagrams are short, so many are needed.
    net.manager.config.max_mad = 160;
    for n in 1..=2 {
        net.join_with(n, 10, 16);
    }
    net.run(SECOND * 2);
    for (host, (_, vema)) in (0..).zip(&mut net.hosts) {
        let macs: Vec<_> = (0..=254).map(|n| Mac([6, host, 0, 0, 0, n])).collect();
        for vport in 0..16 {
            vema.port_mut(vport).unwrap().set_macs(&macs, &[]);
        }
    }
    net.run(SECOND * 4);
    assert!(net.is_complete());
    net.join_with(9, 10, 16);
    net.run(SECOND + SECOND / 2);
    assert!(
        net.manager
            .members()
            .any(|member| { member.address == address(9, 10) && member.is_complete })
    );
}

#[test]
fn member_restarts_once_per_search() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.run(SECOND * 3);
    let search = loop {
        match net.manager.poll_transmit(net.now) {
            Some((MadDestination::Group, mad)) => break VemaHeader::parse(&mad).unwrap().0,
            Some(_) => {}
            None => net.now += Duration::from_millis(10),
        }
    };
    // Responses to this and previous transactions.
    let mut changes = 0;
    for n in 0..1000 {
        let tid = search.tid.get() - u64::from(n / 2);
        let mad = VemaHeader::new(method::GET_RESP, id::CLASS_PORT_INFO, 0, tid).with(&[0; 72]);
        let before = net.manager.members[0].address;
        net.manager.handle_mad(address(1, 100 + n), &mad, net.now);
        changes += u32::from(net.manager.members[0].address != before);
    }
    assert_eq!(changes, 1);
    net.run(SECOND * 2);
    assert!(net.is_complete());
    assert_eq!(net.manager.members[0].address, address(1, 10));
}

#[test]
fn foreign_responses_change_nothing() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.run(SECOND * 2);
    let before = format!("{:?}", net.manager.members);
    let claims = [
        VemaHeader::new(method::GET_RESP, id::VESWPORT_INFO, 0, 1001),
        VemaHeader::new(
            method::GET_RESP,
            id::CLASS_PORT_INFO,
            0,
            DISCOVERY | 1 << 40,
        ),
        VemaHeader::new(method::GET_RESP, id::PATHS, 0, DISCOVERY | 1001),
        VemaHeader::new(method::GET, id::CLASS_PORT_INFO, 0, 1001),
        VemaHeader::new(method::TRAP, id::NOTICE, 0, 1001),
    ];
    for claim in claims {
        let mad = claim.with(&[0; 300]);
        net.manager.handle_mad(address(9, 9), &mad, net.now);
    }
    net.manager.handle_mad(address(1, 10), &[1, 2, 3], net.now);
    assert_eq!(format!("{:?}", net.manager.members), before);
    assert_eq!(net.port(0).info().vport.eth_link_status, 0);
    net.hosts[0].1.port_mut(0).unwrap().set_link(true);
    net.run(SECOND);
    let seen = net.manager.members[0].ports[0].info.unwrap();
    assert_eq!(seen.vport.eth_link_status, link::UP);
}

#[test]
fn vnic_manager() {
    bolero::check!().for_each(|bytes: &[u8]| {
        let mut net = Net::new(&[100]);
        net.join(2, 20);
        // This allows short inputs to configure a member.
        net.manager.admits = Some(net.now);
        let mut rest = bytes;
        // Interprets the input as responses to the current request, with status, length and data,
        // and the same data as datagrams.
        while let [status, len, tail @ ..] = rest {
            let (data, tail) = tail.split_at((usize::from(*len) * 2).min(tail.len()));
            rest = tail;
            net.now += Duration::from_millis(50);
            let Some((to, mad)) = net.manager.poll_transmit(net.now) else {
                continue;
            };
            let (header, _) = VemaHeader::parse(&mad).unwrap();
            let from = match to {
                MadDestination::Group => address(status % 4, 20),
                MadDestination::Member(address) => address,
            };
            let status = u16::from(status & 0x1c);
            let response = header.to_response(status).with(data);
            net.manager.handle_mad(from, &response, net.now);
            net.manager.handle_mad(from, data, net.now);
            assert!(mad.len() <= 1024);
            assert!(net.manager.members.len() <= 4);
            for tables in &net.manager.tables {
                assert!(tables.entries.len() <= MAX_MAC_ENTRIES.into());
            }
        }
        assert!(net.manager.deadline().is_some() || bytes.len() < 2);
    });
}
