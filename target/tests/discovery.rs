//! Sends management MADs over UDP: an initiator discovers the targets on a known address, and a subnet
//! administrator finds the port.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use riser_fabric::sa::administrator::{Administrator, AdministratorConfig};
use riser_fabric::sa::client::Request;
use riser_fabric::sa::wire::node::PortInfoRecord;
use riser_fabric::sa::wire::{Record as _, SaMethod};
use riser_scsi::srp::{PortIdParts, TargetPortId};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::gsi::Gsi;
use riser_test_peers::mini::{Mini, login_req, real};
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{Mtu, PortCapabilities, Provider as _};
use riser_transport::wire::TransactionId;
use riser_transport::wire::dm::{
    Attribute, ClassPortInfo, IoUnitInfo, IocProfile, Method, ServiceEntry, Status,
};
use riser_transport::wire::mad::MadClass;
use zerocopy::FromZeros as _;
use zerocopy::big_endian::U32;

#[test]
fn targets_are_discovered_by_address() {
    let addr = |host| IpAddr::V4(Ipv4Addr::new(127, 79, 1, host));
    let text = "backends: { d: { kind: ram, size: 1MiB } }\n\
         targets:\n\
         - { name: one, portals: [{ protocol: srp, listen: 127.79.1.1, ioc_guid: 0x1122334455667788, id_ext: \"0x0000000000000abc\" }], luns: { 0: { backend: d } }, access: open }\n\
         - { name: two, portals: [{ protocol: srp, listen: \"127.79.1.1:5556\" }], luns: { 0: { backend: d } }, access: open }\n\
         limits: { queue_depth: 17, max_iu_size: 8300 }\n\
         workers: { count: 2 }\n";
    let config = Config::parse(text, "test.yaml").unwrap_or_else(|e| panic!("{e}"));
    let server = Server::start(&config).unwrap();
    let mut gsi = Gsi::open(addr(2));
    let mut get = |attribute| gsi.query(addr(1), Method::Get, attribute);

    let (status, data) = get(Attribute::ClassPortInfo);
    assert_eq!(status, Status::Success);
    assert!(ClassPortInfo::parse(&data).is_some());
    let (_, data) = get(Attribute::IoUnitInfo);
    let unit = IoUnitInfo::parse(&data).unwrap();
    assert_eq!(unit.controllers().collect::<Vec<_>>(), [1, 2]);
    let (_, data) = get(Attribute::IocProfile { slot: 1 });
    let profile = IocProfile::parse(&data).unwrap();
    assert_eq!(
        (profile.guid, profile.name.as_str()),
        (0x1122_3344_5566_7788, "one")
    );
    assert_eq!((profile.send_queue_depth, profile.send_size), (17, 8300));
    assert_eq!(profile.rdma_size, u32::MAX);
    let services = Attribute::ServiceEntries {
        slot: 1,
        first: 0,
        last: profile.services - 1,
    };
    let (_, data) = get(services);
    let entries = ServiceEntry::parse_list(&data, usize::from(profile.services));
    assert_eq!(entries[0].srp_extension(), Some(0xabc));
    assert_eq!(entries[0].service_id, 0x0106_0000 | 5555);
    // srp_daemon only uses services with the standard's name.
    let names = entries.iter().map(|entry| entry.name.as_str());
    assert!(names.eq(["SRP.RDMA_CM:0000000000000abc", "SRP.T10:0000000000000abc"]));
    assert_eq!(entries[1].service_id, 0x1122_3344_5566_7788);

    for (attribute, expected) in [
        (Attribute::IocProfile { slot: 3 }, Status::NoController),
        (Attribute::IocProfile { slot: 0 }, Status::InvalidField),
        (Attribute::IocProfile { slot: 17 }, Status::InvalidField),
        (
            Attribute::ServiceEntries {
                slot: 1,
                first: 3,
                last: 2,
            },
            Status::InvalidField,
        ),
        (
            Attribute::ServiceEntries {
                slot: 1,
                first: 0,
                last: 255,
            },
            Status::InvalidField,
        ),
        (
            Attribute::Other {
                id: 0x20,
                modifier: 0,
            },
            Status::UnsupportedAttribute,
        ),
    ] {
        assert_eq!(get(attribute).0, expected, "{attribute:?}");
    }
    let set = gsi.query(addr(1), Method::Other(2), Attribute::IoUnitInfo);
    assert_eq!(set.0, Status::UnsupportedMethod);

    // The result is sufficient to log in on the same device.
    let target = TargetPortId::from_parts(PortIdParts {
        extension: 0xabc,
        guid: profile.guid,
    });
    let port = entries[0].service_id as u16;
    let req = login_req(2, target);
    let mini = Mini::connected(gsi.dev, SocketAddr::new(addr(1), port), &req, &mut real);
    mini.disconnect(&mut real);
    server.shutdown().unwrap();
}

/// Runs a subnet administrator until a port has been registered.
fn administer(addr: IpAddr) -> Administrator {
    let mut device = Roce::open(&RoceConfig::new(addr)).unwrap();
    for class in [MadClass::SubnetAdm, MadClass::Performance] {
        device.register_agent(class).unwrap();
    }
    let config = AdministratorConfig::new(addr, Mtu::Mtu1024, [5; 16]);
    let mut administrator = Administrator::new(config);
    let end = Instant::now() + Duration::from_secs(30);
    while administrator.usage().ports == 0 {
        let now = Instant::now();
        assert!(now < end, "no port was registered");
        device.progress(now);
        while let Some((from, mad)) = device.poll_mad() {
            administrator.handle_mad(now, from.into(), &mad);
        }
        while let Some((to, mad)) = administrator.poll_transmit(now) {
            device.send_mad(to.ip(), &mad).unwrap();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    administrator
}

#[test]
fn port_is_registered_with_administrator() {
    let [own, riserd] = [1, 2].map(|host| IpAddr::V4(Ipv4Addr::new(127, 79, 2, host)));
    let text = format!(
        "backends: {{ d: {{ kind: ram, size: 1MiB }} }}\n\
         targets: [{{ name: one, portals: [{{ protocol: srp, listen: {riserd} }}], luns: {{ 0: d }}, access: open }}]\n\
         workers: {{ count: 2 }}\n\
         transport: {{ administrator: {own} }}\n"
    );
    let config = Config::parse(&text, "test.yaml").unwrap_or_else(|e| panic!("{e}"));
    let server = Server::start(&config).unwrap();
    let mut administrator = administer(own);
    // The ports that support device management, queried by the administrator's own host.
    let mut wanted = PortInfoRecord::new_zeroed();
    wanted.info.capabilities = U32::new(PortCapabilities::DEVICE_MANAGEMENT.bits());
    let mut mad = Request::new(SaMethod::GetTable, 1 << 7, &wanted).emit(TransactionId(1));
    mad[20] = 0x80;
    let now = Instant::now();
    administrator.handle_mad(now, own.into(), &mad);
    let (_, response) = administrator.poll_transmit(now).unwrap();
    let port = PortInfoRecord::read(&response[56..]).unwrap();
    // The low bits of 127.79.2.2 are the LID.
    assert_eq!(port.lid.get(), 0x0202);
    assert_eq!(port.info.capabilities.get(), 0x9_0000);
    server.shutdown().unwrap();
}
