use std::net::IpAddr;

use riser_transport::verbs::Gid;

use super::*;
use crate::vnic::vema::{BUSY, Vema, VemaConfig};
use crate::vnic::wire::attr::link;
use crate::vnic::{QpAddress, port};

fn address(n: u8, qpn: u32) -> QpAddress {
    QpAddress {
        gid: Gid::from(IpAddr::from([10, 0, 0, n])),
        qpn,
    }
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

/// A network of hosts with a manager; every datagram arrives at once, unless it is lost.
struct Net {
    now: Instant,
    manager: EthernetManager,
    hosts: Vec<(QpAddress, Vema)>,
    /// One of this number of datagrams is lost; 0 loses none.
    loss: usize,
    sent: usize,
}

impl Net {
    fn new(vesws: &[u16]) -> Self {
        Self {
            now: Instant::now(),
            manager: EthernetManager::new(config(vesws)),
            hosts: Vec::new(),
            loss: 0,
            sent: 0,
        }
    }

    fn join(&mut self, n: u8, qpn: u32) {
        let vema = Vema::new(VemaConfig {
            qpn: 100 + u32::from(n),
            mtu: 1024,
            max_vports: 2,
            manager: None,
        });
        self.hosts.push((address(n, qpn), vema));
    }

    fn is_lost(&mut self) -> bool {
        self.sent += 1;
        self.loss != 0 && self.sent.is_multiple_of(self.loss)
    }

    /// Everything that happens in a time.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            while let Some((to, mad)) = self.manager.poll_transmit(self.now) {
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
                    let answer = self.hosts[index].1.handle_mad(from, &mad, self.now);
                    if let Some(answer) = answer.filter(|_| !self.is_lost()) {
                        self.manager.handle_mad(address, &answer, self.now);
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
fn members_are_found_configured_and_know_each_other() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.join(2, 20);
    net.run(Duration::from_millis(110));
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
fn a_late_member_is_found_within_an_interval() {
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
fn a_member_that_dies_is_forgotten_and_its_lid_is_given_again() {
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
    net.join(4, 10);
    net.run(SECOND * 2);
    assert_eq!(net.lids(0), [1, 2, 3]);
    // The dead one comes back with a LID that another has now.
    net.hosts.push((address(2, 10), dead));
    net.run(SECOND * 2);
    assert!(net.is_complete());
    assert_eq!(net.lids(3), [1, 2, 3, 4]);
    assert_eq!(net.hosts[3].1.lid(0), Some(Lid(4)));
}

#[test]
fn a_restarted_member_keeps_its_lid_and_gets_its_tables() {
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
fn a_restarted_manager_leaves_members_as_they_are() {
    let mut net = Net::new(&[100]);
    for n in [3, 1, 2] {
        net.join(n, 10);
    }
    net.run(SECOND * 2);
    // Entries of the table before must go.
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
    net.manager = EthernetManager::new(ManagerConfig {
        address: address(1, 6),
        first_tid: 5_000_000,
        ..config(&[100])
    });
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
fn addresses_of_an_interface_reach_all_tables_soon() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.join(2, 20);
    net.run(SECOND * 3);
    let mac = |n: u8| Mac([0x06, 0, 0, 0, 0, n]);
    let macs: Vec<_> = (0..255).map(mac).collect();
    net.hosts[0].1.port_mut(0).unwrap().set_macs(&macs, &[]);
    net.hosts[0].1.port_mut(0).unwrap().set_link(true);
    // A trap says so: it does not take an interval.
    net.run(Duration::from_millis(200));
    assert_eq!(net.port(1).mac_table().len(), 257);
    assert_eq!(net.port(1).mac_table().dlid(mac(254)), Some(Lid(1)));
    assert_eq!(
        net.port(1).mac_table().digest(),
        net.port(0).mac_table().digest()
    );
    // The second one has some of them as well: the first keeps them.
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
fn members_are_bounded_and_one_that_refuses_stalls_no_other() {
    let mut net = Net::new(&[100]);
    for n in 0..=254 {
        net.join(n, 10);
    }
    // Another manager has the first one.
    let claim = VemaHeader::new(method::SET, id::CLASS_PORT_INFO, 0, 1).with(&[0; 80]);
    let other = address(250, 99);
    let answer = net.hosts[0].1.handle_mad(other, &claim, net.now).unwrap();
    assert_eq!(VemaHeader::parse(&answer).unwrap().0.status.get(), 0);
    net.run(SECOND);
    let members: Vec<_> = net.manager.members().collect();
    assert_eq!(members.len(), MAX_MEMBERS);
    assert!(members[1..].iter().all(|member| member.is_complete));
    assert!(!members[0].is_complete);
    assert_eq!(net.lids(1).len(), MAX_MEMBERS - 1);
    let again = net.hosts[0]
        .1
        .handle_mad(address(1, 5), &claim, net.now)
        .unwrap();
    assert_eq!(VemaHeader::parse(&again).unwrap().0.status.get(), BUSY);
}

#[test]
fn answers_of_others_change_nothing() {
    let mut net = Net::new(&[100]);
    net.join(1, 10);
    net.run(SECOND);
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
        let mut rest = bytes;
        // Answers to the request under way, with the input's status and attribute: status, length,
        // data; and the same bytes as datagrams.
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
            let answer = header.answer(status).with(data);
            net.manager.handle_mad(from, &answer, net.now);
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
