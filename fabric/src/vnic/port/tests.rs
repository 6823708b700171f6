use std::time::Duration;

use super::*;
use crate::vnic::MAX_FRAME;
use crate::vnic::wire::attr::MacTableEntry;
use crate::vnic::wire::packet::Fragment;

const GROUP: Lid = Lid(0xf0_0064);

fn gid(n: u8) -> Gid {
    Gid::from(std::net::IpAddr::from([10, 0, 0, n]))
}

fn path(n: u8, mtu: u16) -> Path {
    Path {
        dlid: u32::from(n).into(),
        qpn: (100 + u32::from(n)).into(),
        mtu: mtu.into(),
        reserved: 0.into(),
        gid: gid(n).0,
    }
}

fn config(n: u8, mtu: u16) -> VeswPortInfo {
    let mut info = VeswPortInfo::power_on();
    info.vesw.vesw_id = 100.into();
    info.vesw.pkey = 0xffff.into();
    info.vesw.u_mcast_dlid = GROUP.0.into();
    info.vesw.def_port_mask = 1.into();
    info.vesw.u_ucast_dlid[0] = GROUP.0.into();
    info.vesw.eth_mtu = mtu.into();
    info.vport.port_num = u32::from(n).into();
    info.vport.encap_slid = u32::from(n).into();
    info.vport.base_mac_addr = Mac::of_lid(Lid(n.into()));
    info.vport.config_state = state::FORWARDING;
    info
}

/// Creates port `n` of a switch with ports 1 to 3.
fn port(n: u8, eth_mtu: u16) -> VirtualPort {
    let mut port = VirtualPort::new(0, 1024);
    assert!(port.configure(&config(n, eth_mtu)));
    let others: Vec<_> = (1..=3).filter(|m| *m != n).map(|m| path(m, 1024)).collect();
    assert!(port.set_paths(0, 2, &others));
    port.set_link(true);
    port
}

fn frame(dest: Mac, source: Mac, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[..6].copy_from_slice(&dest.0);
    bytes[6..12].copy_from_slice(&source.0);
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]);
    for (n, byte) in bytes[14..].iter_mut().enumerate() {
        *byte = n as u8;
    }
    bytes
}

fn packets(out: &Encapsulated, frame: &[u8]) -> Vec<Vec<u8>> {
    let packet = |index| {
        let mut packet = vec![0; out.mtu];
        let len = out.emit(frame, index, &mut packet);
        packet.truncate(len);
        packet
    };
    (0..out.packets(frame.len())).map(packet).collect()
}

/// Returns the address of port `n`.
fn end(n: u8) -> QpAddress {
    QpAddress {
        gid: gid(n),
        qpn: 100 + u32::from(n),
    }
}

fn to(n: u8) -> Destination {
    Destination::Port(end(n))
}

#[test]
fn frames_of_all_lengths_arrive_unchanged() {
    let now = Instant::now();
    let (mut a, mut b) = (port(1, 9000), port(2, 9000));
    let mac = |n: u8| Mac::of_lid(Lid(n.into()));
    for len in [60, 61, 1004, 1005, 1514, 2048, 4096, 9014] {
        let sent = frame(mac(2), mac(1), len);
        let out = a.encapsulate(&sent, now).unwrap();
        assert_eq!(out.to, to(2));
        let packets = packets(&out, &sent);
        assert_eq!(packets.len() > 1, len > 1004, "{len}");
        let (last, before) = packets.split_last().unwrap();
        for packet in before {
            assert_eq!(packet.len(), 1024);
            assert_eq!(b.decapsulate(end(1), packet, now), Ok(None));
        }
        assert_eq!(b.decapsulate(end(1), last, now), Ok(Some(&sent[..])));
    }
    assert_eq!((a.stats().tx_packets(), b.stats().rx_packets()), (8, 8));
    assert_eq!((a.stats().tx_errors(), b.stats().rx_errors()), (0, 0));
}

#[test]
fn table_takes_precedence_over_learned_addresses() {
    let now = Instant::now();
    let mut a = port(1, 1500);
    let source = Mac::of_lid(Lid(1));
    let dest = |a: &mut VirtualPort, mac| {
        let out = a.encapsulate(&frame(mac, source, 60), now);
        out.map(|out| (out.to, out.header.dlid))
    };
    let local = Mac::of_lid(Lid(3));
    assert_eq!(dest(&mut a, local), Ok((to(3), Lid(3))));
    let strange = Mac([0x02, 0x42, 0xac, 0x11, 0, 2]);
    let group = (Destination::Group, GROUP);
    assert_eq!(dest(&mut a, strange), Ok(group), "no port of the switch");
    assert_eq!(dest(&mut a, Mac([0xff; 6])), Ok(group));
    // A frame from this address arrives from port 2.
    let mut b = port(2, 1500);
    let hello = frame(Mac([0xff; 6]), strange, 60);
    let out = b.encapsulate(&hello, now).unwrap();
    let packet = &packets(&out, &hello)[0];
    assert!(a.decapsulate(end(2), packet, now).unwrap().is_some());
    assert_eq!(dest(&mut a, strange), Ok((to(2), Lid(2))));
    let entry = |mac, lid| MacTableEntry::new(mac, Lid(lid));
    assert!(
        a.mac_table_mut()
            .set(0, &[entry(strange, 3), entry(local, 2)], 1)
    );
    assert_eq!(dest(&mut a, strange), Ok((to(3), Lid(3))));
    assert_eq!(dest(&mut a, local), Ok((to(2), Lid(2))));
    // Entries of removed ports, of the port itself, and of a nonexistent port.
    let entries = [entry(strange, 9), entry(local, 1)];
    assert!(a.mac_table_mut().set(0, &entries, 1));
    assert_eq!(dest(&mut a, strange), Err(TxDrop::DlidZero));
    assert_eq!(dest(&mut a, local), Err(TxDrop::Logic));
    assert_eq!(a.stats().tx_errors(), 2);
}

#[test]
fn unknown_address_needs_default_port() {
    let now = Instant::now();
    let mut a = VirtualPort::new(0, 4096);
    let mut info = config(1, 1500);
    info.vesw.def_port_mask = 0.into();
    a.configure(&info);
    let sent = frame(Mac([0, 1, 2, 3, 4, 5]), Mac::of_lid(Lid(1)), 60);
    assert_eq!(a.encapsulate(&sent, now).unwrap_err(), TxDrop::DlidZero);
    // Two default ports share the flows.
    info.vesw.def_port_mask = 0b101.into();
    info.vesw.u_ucast_dlid[0] = 2.into();
    info.vesw.u_ucast_dlid[2] = 3.into();
    a.configure(&info);
    a.set_paths(0, 2, &[path(2, 4096), path(3, 4096)]);
    let mut seen = BTreeSet::new();
    for n in 0..64 {
        let sent = frame(Mac([0, 1, 2, 3, 4, n]), Mac::of_lid(Lid(1)), 60);
        seen.insert(a.encapsulate(&sent, now).unwrap().header.dlid);
    }
    assert_eq!(seen, BTreeSet::from([Lid(2), Lid(3)]));
}

#[test]
fn priorities_choose_class_lane_and_mtu() {
    let now = Instant::now();
    let mut a = VirtualPort::new(0, 4096);
    let mut info = config(1, 1500);
    info.vesw.eth_mtu_pcp[5] = 500.into();
    info.vport.pcp_to_sc_uc = [10, 11, 12, 13, 14, 15, 16, 17];
    info.vport.pcp_to_vl_uc = [0, 1, 2, 3, 4, 5, 6, 7];
    info.vport.pcp_to_sc_mc[5] = 30;
    info.vport.pcp_to_vl_mc[5] = 8;
    info.vport.non_vlan_sc_uc = 1;
    info.vport.non_vlan_vl_uc = 2;
    info.vport.non_vlan_sc_mc = 3;
    info.vport.non_vlan_vl_mc = 4;
    a.configure(&info);
    a.set_paths(0, 1, &[path(2, 4096)]);
    let mut class = |dest, pcp: Option<u8>, len| {
        let mut sent = frame(dest, Mac::of_lid(Lid(1)), len);
        if let Some(pcp) = pcp {
            sent[12..16].copy_from_slice(&[0x81, 0, pcp << 5, 1]);
        }
        let out = a.encapsulate(&sent, now);
        out.map(|out| (out.header.sc, out.vl))
    };
    let (one, all) = (Mac::of_lid(Lid(2)), Mac([0xff; 6]));
    assert_eq!(class(one, None, 1514), Ok((1, 2)));
    assert_eq!(class(one, None, 1515), Err(TxDrop::Logic));
    assert_eq!(class(all, None, 60), Ok((3, 4)));
    for pcp in 0..8 {
        assert_eq!(class(one, Some(pcp), 500), Ok((10 + pcp, pcp)));
    }
    assert_eq!(class(all, Some(5), 60), Ok((30, 8)));
    assert_eq!(class(one, Some(5), 518), Ok((15, 5)));
    assert_eq!(class(one, Some(5), 519), Err(TxDrop::Logic));
    assert_eq!(class(one, Some(4), 1518), Ok((14, 4)));
}

#[test]
fn routing_control_depends_on_protocol() {
    let now = Instant::now();
    let mut a = port(1, 1500);
    let mut info = config(1, 1500);
    // 1 is the default, 2 IPv4, 3 UDP, 4 TCP, 5 IPv6, 6 TCP, 7 UDP.
    info.vesw.rc = 0x0765_4321.into();
    info.vesw.rc = (info.vesw.rc.get() & 0x0fff_ffff).into();
    a.configure(&info);
    let mut rc = |ether_type: [u8; 2], at: usize, protocol: u8| {
        let mut sent = frame(Mac::of_lid(Lid(2)), Mac::of_lid(Lid(1)), 80);
        sent[12..14].copy_from_slice(&ether_type);
        sent[14 + at] = protocol;
        a.encapsulate(&sent, now).unwrap().header.rc
    };
    assert_eq!(rc([0x88, 0xb5], 0, 0), 1);
    assert_eq!(rc([8, 0], 9, 1), 2);
    assert_eq!(rc([8, 0], 9, 17), 3);
    assert_eq!(rc([8, 0], 9, 6), 4);
    assert_eq!(rc([0x86, 0xdd], 6, 58), 5);
    assert_eq!(rc([0x86, 0xdd], 6, 6), 6);
    assert_eq!(rc([0x86, 0xdd], 6, 17), 7);
}

#[test]
fn misdirected_packets_are_counted() {
    let now = Instant::now();
    let mut a = port(1, 1500);
    let sent = frame(Mac::of_lid(Lid(2)), Mac::of_lid(Lid(1)), 60);
    let out = a.encapsulate(&sent, now).unwrap();
    let with = |change: fn(&mut Header), data: &[u8]| {
        let mut header = out.header;
        change(&mut header);
        let mut packet = vec![0; 1200];
        let at = header.emit(data.len(), &mut packet);
        packet[at..at + data.len()].copy_from_slice(data);
        packet.truncate(at + data.len());
        packet
    };
    let mut b = port(2, 600);
    let mut take =
        |packet: Vec<u8>, from| b.decapsulate(end(from), &packet, now).map(|f| f.is_some());
    assert_eq!(take(with(|_| {}, &sent), 1), Ok(true));
    assert_eq!(
        take(with(|_| {}, &sent), 3),
        Err(RxDrop::Logic),
        "another host"
    );
    assert_eq!(
        take(with(|h| h.vesw_id = 7, &sent), 1),
        Err(RxDrop::BadVeswId)
    );
    assert_eq!(
        take(with(|h| h.dlid = Lid(3), &sent), 1),
        Err(RxDrop::Logic)
    );
    assert_eq!(take(with(|h| h.dlid = GROUP, &sent), 1), Ok(true));
    assert_eq!(
        take(with(|h| h.slid = Lid(2), &sent), 1),
        Err(RxDrop::Logic)
    );
    assert_eq!(
        take(with(|h| h.pkey = 0x8001, &sent), 1),
        Err(RxDrop::Logic)
    );
    assert_eq!(
        take(with(|h| h.pkey = 0x7fff, &sent), 1),
        Ok(true),
        "a limited member"
    );
    assert_eq!(
        take(with(|h| h.slid = Lid(9), &sent), 1),
        Err(RxDrop::Logic),
        "no member"
    );
    assert_eq!(take(with(|_| {}, &sent[..59]), 1), Err(RxDrop::Runt));
    assert_eq!(take(with(|_| {}, &[7; 615]), 1), Err(RxDrop::Oversize));
    let fragment = Fragment {
        ident: 1,
        offset: 0,
        frame_len: 100,
    };
    let mut header = out.header;
    header.fragment = Some(fragment);
    header.slid = Lid(9);
    let mut packet = vec![0; 88];
    header.emit(60, &mut packet);
    assert_eq!(take(packet, 1), Err(RxDrop::Logic), "no path, no fragments");
    assert_eq!(take(vec![0; 30], 1), Err(RxDrop::Logic));
    let stranger = QpAddress { qpn: 7, ..end(1) };
    let packet = with(|_| {}, &sent);
    assert_eq!(
        b.decapsulate(stranger, &packet, now),
        Err(RxDrop::Logic),
        "another queue pair"
    );
    b.set_link(false);
    assert_eq!(b.decapsulate(end(1), &packet, now), Err(RxDrop::EthDown));
    b.reset();
    let stopped = with(|h| h.vesw_id = 0, &sent);
    assert_eq!(b.decapsulate(end(1), &stopped, now), Err(RxDrop::DropState));
    assert_eq!(a.encapsulate(&sent[..13], now).unwrap_err(), TxDrop::Logic);
    a.reset();
    assert_eq!(a.encapsulate(&sent, now).unwrap_err(), TxDrop::DropState);
    let errors = b.stats().errors(0, &b.info());
    assert_eq!(errors.rx_bad_veswid.get(), 1);
    assert_eq!(
        (errors.rx_eth_down.get(), errors.rx_drop_state.get()),
        (1, 1)
    );
    assert_eq!((errors.rx_runt.get(), errors.rx_oversize.get()), (1, 1));
}

#[test]
fn read_only_port_fields_are_preserved() {
    let mut a = VirtualPort::new(0, 4096);
    a.set_link(true);
    a.set_macs(&[Mac([2; 6])], &[]);
    let mut info = config(1, 1500);
    info.vesw.rsvd3 = [0x33; 40];
    info.vport.rsvd2 = [0x22; 48];
    info.vport.max_mac_tbl_ent = 7.into();
    info.vport.mac_tbl_digest = 7.into();
    info.vport.eth_link_status = link::DOWN;
    info.vport.uc_macs_gen_count = 7.into();
    info.vport.oper_state = state::DROP_ALL;
    assert!(a.configure(&info));
    let read = a.info();
    assert_eq!(read.vport.max_mac_tbl_ent.get(), 2048);
    assert_eq!(read.vport.mac_tbl_digest.get(), 0);
    assert_eq!(read.vport.eth_link_status, link::UP);
    assert_eq!(read.vport.uc_macs_gen_count.get(), 1);
    assert_eq!(read.vport.oper_state, state::FORWARDING);
    assert_eq!((read.vesw, read.vport.rsvd2), (info.vesw, info.vport.rsvd2));
    let interface = a.poll_interface().unwrap();
    assert_eq!(interface.mac, Some(Mac::of_lid(Lid(1))));
    assert_eq!((interface.mtu, interface.carrier), (Some(1500), true));
    assert_eq!(a.poll_interface(), None);
    for (eth_mtu, state) in [(67, state::FORWARDING), (9217, 3), (1500, 2), (1500, 0)] {
        info.vesw.eth_mtu = eth_mtu.into();
        info.vport.config_state = state;
        assert!(!a.configure(&info), "{eth_mtu} {state}");
    }
    // A forwarding port requires a switch and an address.
    let valid = config(1, 1500);
    for (vesw_id, lid) in [
        (0, 1),
        (0x1000, 1),
        (100, 0),
        (100, GROUP.0),
        (100, 1 << 24),
    ] {
        info = valid;
        info.vesw.vesw_id = vesw_id.into();
        info.vport.encap_slid = lid.into();
        assert!(!a.configure(&info), "{vesw_id} {lid}");
    }
    a.mac_table_mut().set(0, &[], 9);
    assert_eq!(a.info().vport.mac_tbl_digest.get(), 9);
    a.reset();
    assert_eq!(a.info().vport.mac_tbl_digest.get(), 0);
    assert_eq!(a.info().vport.uc_macs_gen_count.get(), 1);
    assert!(!a.poll_interface().unwrap().carrier);
}

#[test]
fn smallest_path_mtu_limits_group_packets() {
    let now = Instant::now();
    let mut a = VirtualPort::new(0, 4096);
    a.configure(&config(1, 9000));
    let source = Mac::of_lid(Lid(1));
    let mtu =
        |a: &mut VirtualPort, dest| a.encapsulate(&frame(dest, source, 60), now).map(|o| o.mtu);
    assert_eq!(mtu(&mut a, Mac([0xff; 6])), Ok(4096));
    assert!(a.set_paths(0, 2, &[path(2, 4096), path(3, 1024)]));
    assert_eq!(mtu(&mut a, Mac([0xff; 6])), Ok(1024));
    assert_eq!(mtu(&mut a, Mac::of_lid(Lid(2))), Ok(4096));
    assert!(a.set_paths(1, 2, &[path(3, 2048)]));
    assert_eq!(mtu(&mut a, Mac([0xff; 6])), Ok(2048));
    assert!(a.set_paths(0, 1, &[]), "the second port is gone");
    assert_eq!(a.paths().len(), 1);
    for (offset, total, wrong) in [
        (3, 4, path(4, 1024)),
        (0, 0, path(4, 1024)),
        (0, 1, path(4, 1023)),
        (0, 1, path(0, 1024)),
        (0, 255, path(4, 1024)),
    ] {
        assert!(!a.set_paths(offset, total, &[wrong]), "{offset} {total}");
    }
    assert_eq!(a.paths().len(), 1);
}

#[test]
fn interface_change_reports_are_rate_limited() {
    let mut now = Instant::now();
    let mut a = VirtualPort::new(4, 4096);
    a.configure(&config(1, 1500));
    let base = Mac::of_lid(Lid(1));
    a.set_link(true);
    a.set_macs(&[base, Mac([2; 6])], &[Mac([1; 6])]);
    assert_eq!(
        a.ucast_macs(),
        [Mac([2; 6])],
        "the manager knows the other one"
    );
    let opcodes = |a: &mut VirtualPort, now| {
        let mut opcodes = Vec::new();
        while let Some(notice) = a.poll_notice(now) {
            let trap = notice.trap().unwrap();
            assert_eq!((trap.vesw_port_index, trap.vesw_id.get()), (4, 100));
            opcodes.push(trap.opcode);
        }
        opcodes
    };
    assert_eq!(opcodes(&mut a, now), [1, 2, 3]);
    a.set_link(true);
    a.set_macs(&[base, Mac([2; 6])], &[Mac([1; 6])]);
    assert!(opcodes(&mut a, now).is_empty(), "nothing has changed");
    let mut sent = 3;
    for n in 0..20 {
        a.set_link(n % 2 == 1);
        sent += opcodes(&mut a, now).len();
        now += Duration::from_millis(10);
    }
    assert_eq!(sent, 5);
    a.set_macs(&vec![Mac([2; 6]); 1000], &[]);
    assert_eq!(a.ucast_macs().len(), MAX_IFACE_MACS);
}

#[test]
fn vnic_packets() {
    bolero::check!().for_each(|bytes: &[u8]| {
        let now = Instant::now();
        let mut a = port(1, 9000);
        // Interprets length-prefixed parts of the input as packets from port 2 and as frames.
        let mut rest = bytes;
        while let [len, tail @ ..] = rest {
            let (packet, tail) = tail.split_at(usize::from(*len).min(tail.len()));
            rest = tail;
            let mut whole = vec![0; 28];
            let header = Header {
                slid: Lid(2),
                dlid: Lid(1),
                pkey: 0xffff,
                entropy: 0,
                sc: 0,
                rc: 0,
                fecn: false,
                becn: false,
                age: 0,
                vesw_id: 100,
                fragment: None,
            };
            let at = header.emit(packet.len(), &mut whole);
            whole.truncate(at);
            whole.extend_from_slice(packet);
            for packet in [packet, &whole[..]] {
                if let Ok(Some(frame)) = a.decapsulate(end(2), packet, now) {
                    assert!((frame::MIN..=MAX_FRAME).contains(&frame.len()));
                }
            }
            if let Ok(out) = a.encapsulate(packet, now) {
                let sent = packets(&out, packet);
                assert!(sent.iter().all(|packet| packet.len() <= out.mtu));
            }
        }
        let counted = a.stats().rx_packets() + a.stats().rx_errors();
        assert!(counted <= 2 * bytes.len() as u64);
        assert!(a.learned.len() <= crate::vnic::mac_table::MAX_LEARNED_OF_PORT);
    });
}
